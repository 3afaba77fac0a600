"""`sliced`: attention of a re-ordered batch in pieces, on any device, without a mask of L x L and without gathers in the layers.

Per sample one causal call over prompt + clean, and the noisy queries in chunks against the keys they may need. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.model_order import Layout, Sample, Span
from jacobi_core.distillation.packing import PackedRow
from jacobi_core.distillation.visibility import TokenFields, visible

CHUNK = 256  # noisy queries of one call: of 64 to 512 the fastest at 2048 tokens on 2 cores
SHORT = 256  # a sample of at most so many tokens is one masked call


@dataclass(frozen=True)
class Piece:
    """One call of scaled_dot_product_attention. mask: bool [queries, keys]; None: causal, and keys is the queries' span."""

    queries: Span
    keys: tuple[Span, ...]
    mask: torch.Tensor | None


@dataclass(frozen=True)
class SlicedPlan:
    """The pieces of one batch; every token that is no padding is a query of exactly one. The same for all layers."""

    shape: tuple[int, int]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, batch: PackedRow, variant: MaskVariant, *, chunk: int = CHUNK, short: int = SHORT) -> SlicedPlan:
        """batch: fields [B, L], in `model_order`."""
        layout, fields = Layout(batch, variant), TokenFields.of(batch).map(torch.flatten)

        def masked(queries: Span, keys: list[Span]) -> Piece:
            rows, columns = fields.map(lambda f: f[queries[0] : queries[1], None]), fields.map(lambda f: torch.cat([f[a:b] for a, b in keys]))
            return Piece(queries, tuple(keys), visible(queries=rows, keys=columns, variant=variant))

        pieces = []
        for sample in layout.samples:
            whole, causal = (sample.start, sample.end), (sample.start, sample.noisy)
            if sample.end - sample.start <= short:
                pieces.append(masked(whole, [whole]))
                continue
            pieces.append(Piece(causal, (causal,), None))
            pieces += [masked(queries, layout.keys_of(sample, queries)) for queries in _chunks(sample, chunk)]
        return cls(tuple(batch.input_ids.shape), tuple(pieces))

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None, dropout: float
    ) -> torch.Tensor:
        """As Plan has it; 0 at padding."""
        return _Sliced.apply(query, key, value, self, scaling, dropout)


def _chunks(sample: Sample, chunk: int) -> Iterator[Span]:
    """The noisy tokens in runs of at most `chunk`: a longer group is cut evenly, shorter ones are merged."""
    start = end = sample.noisy
    for a, b in sample.groups:
        if b - start > chunk and end > start:
            yield start, end
            start = a
        if b - a > chunk:
            cuts = torch.linspace(a, b, -(-(b - a) // chunk) + 1).long().tolist()
            yield from pairwise(cuts)
            start = b
        end = b
    if end > start:
        yield start, end


class _Sliced(torch.autograd.Function):
    """Keeps nothing but its inputs for the backward pass, which computes each piece once more.

    Autograd alone would keep a copy of the keys and a float mask per piece and layer, and pad the gradient of every slice to full length.
    """

    @staticmethod
    def forward(ctx, query, key, value, plan, scaling, dropout):
        ctx.save_for_backward(query, key, value)
        ctx.plan, ctx.scaling, ctx.dropout = plan, scaling, dropout
        ctx.random = _random_state(query.device) if dropout else None
        rows, heads, length, _ = query.shape
        q, k, v = _tokens(query), _tokens(key), _tokens(value)
        out = q.new_zeros(len(q), heads, value.shape[-1])
        for piece in plan.pieces:
            start, end = piece.queries
            out[start:end] = _attend(q[start:end], _gather(k, piece), _gather(v, piece), piece, scaling, dropout)
        return out.view(rows, length, heads, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        saved = ctx.saved_tensors  # once: under gradient checkpointing asking computes them again
        shapes = [tensor.transpose(1, 2).shape for tensor in saved]
        q, k, v = map(_tokens, saved)
        gradient = gradient.flatten(0, 1)
        wide = torch.promote_types(k.dtype, torch.float32)  # keys are used by many pieces: their sum must not be rounded each time
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        with _random_from(ctx.random, q.device):
            for piece in ctx.plan.pieces:
                start, end = piece.queries
                inputs = [t.detach().requires_grad_() for t in (q[start:end], _gather(k, piece), _gather(v, piece))]
                with torch.enable_grad():
                    out = _attend(*inputs, piece, ctx.scaling, ctx.dropout)
                d_q[start:end], piece_k, piece_v = torch.autograd.grad(out, inputs, gradient[start:end])
                at = 0
                for a, b in piece.keys:
                    d_k[a:b] += piece_k[at : at + b - a]
                    d_v[a:b] += piece_v[at : at + b - a]
                    at += b - a
        d_q, d_k, d_v = (d.to(q.dtype).view(shape).transpose(1, 2) for d, shape in zip((d_q, d_k, d_v), shapes, strict=True))
        return d_q, d_k, d_v, None, None, None


def _tokens(heads: torch.Tensor) -> torch.Tensor:
    """[B, H, L, D] -> [B * L, H, D]; a view of what transformers' projections give."""
    return heads.transpose(1, 2).flatten(0, 1)


def _gather(tokens: torch.Tensor, piece: Piece) -> torch.Tensor:
    """[T, H, D] -> the piece's keys or values [k, H, D]; a view where they are one span."""
    spans = [tokens[start:end] for start, end in piece.keys]
    return spans[0] if len(spans) == 1 else torch.cat(spans)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scaling: float | None, dropout: float) -> torch.Tensor:
    """q [q, H, D], k and v [k, H_kv, D] -> [q, H, D]."""
    grouped = k.shape[1] != q.shape[1]
    if grouped and piece.mask is not None and q.device.type != "cpu":  # CUDA's fast kernels take a mask or grouped heads, not both
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        grouped = False
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=piece.mask, is_causal=piece.mask is None, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    return out.squeeze(0).transpose(0, 1)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _random_from(state: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """Dropout inside draws what it drew from `state`; the generator is as before afterwards."""
    if state is None:
        yield
        return
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        torch.cuda.set_rng_state(state, device) if cuda else torch.set_rng_state(state)
        yield
