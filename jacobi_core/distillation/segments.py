"""`flash`: the groups of a re-ordered batch, each with exactly its keys, as one variable-length causal call per layer.

A group's queries stand at the end of its keys (bottom-right causal). Every group has its own copy of the clean prefix before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.model_order import Layout, Span
from jacobi_core.distillation.packing import PackedRow

# Most keys per token. Copies cost no arithmetic, which is that of the mask whatever is copied, but memory: at 8 heads of 128 in bfloat16 a token's
# key and value are 4 KB, so 16 copies of 16,384 tokens are 1 GB per layer. The backward pass keeps them: of all layers, or of one with activation
# checkpointing. With blocks of 16 a row of L tokens has about L / 2048 keys per token at window 16 (9.0 at 16,384), and L / 128 for nc_ic and
# window 1 (over 100), which no memory bears.
COPIES = 16

# (q [T_q, H, D], k and v [T_k, H_kv, D], cu_q and cu_k int32 [groups + 1], longest q, longest k, scaling) -> [T_q, H, D]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, float | None], torch.Tensor]


class TooManyCopies(ValueError):
    """A batch that another backend should compute; the message says why."""


@dataclass(frozen=True)
class SegmentPlan:
    """keys: long [T_k], which token of the batch (rows one after another) each key is; queries are all its tokens in order. cu_q, cu_k: int32
    [groups + 1], where the groups begin and end. Padding is a group of its own."""

    shape: tuple[int, int]
    keys: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest: tuple[int, int]
    kernel: Kernel

    @classmethod
    def of(cls, batch: PackedRow, variant: MaskVariant, *, kernel: Kernel, copies: float = COPIES) -> SegmentPlan:
        """batch: fields [B, L], in `model_order`. Raises TooManyCopies where there would be more than `copies` keys per token."""
        layout = Layout(batch, variant)
        groups: list[tuple[Span, list[Span]]] = [(span, [span]) for span in layout.padding]
        for sample in layout.samples:
            causal = (sample.start, sample.noisy)
            groups.append((causal, [causal]))
            groups += [(queries, layout.keys_of(sample, queries)) for queries in sample.groups]
        groups.sort()
        tokens = batch.input_ids.numel()
        q_sizes = [end - start for (start, end), _ in groups]
        k_sizes = [sum(end - start for start, end in keys) for _, keys in groups]
        if sum(k_sizes) > copies * tokens:
            raise TooManyCopies(
                f"flash copies the clean prefix for each of the {len(groups)} groups of this batch, {sum(k_sizes) / tokens:.1f} keys per token "
                f"(memory bears {copies:g}): use attention=flex or sliced, a longer window, or shorter answers"
            )

        def there(cpu: torch.Tensor) -> torch.Tensor:
            return cpu.to(batch.input_ids.device, non_blocking=True)  # without waiting: CUDA takes its own copy of pageable memory first

        keys = there(torch.cat([torch.arange(start, end) for _, spans in groups for start, end in spans]))
        cu_q, cu_k = (there(torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)) for sizes in (q_sizes, k_sizes))
        return cls(tuple(batch.input_ids.shape), keys, cu_q, cu_k, (max(q_sizes), max(k_sizes)), kernel)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None, dropout: float
    ) -> torch.Tensor:
        """As Plan has it. Raises ValueError for dropout."""
        if dropout:
            raise ValueError("flash has no dropout in its variable-length kernel: set attention_dropout=0, or use attention=sliced")
        q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
        k, v = _Copied.apply(k, self.keys), _Copied.apply(v, self.keys)
        out = self.kernel(q, k, v, self.cu_q, self.cu_k, *self.longest, scaling)
        return out.view(*self.shape, *out.shape[1:])


class _Copied(torch.autograd.Function):
    """tokens.index_select(0, index), its gradient summed in float32 at least: a prompt's key has a copy in every group of its sample, and their
    sum must not be rounded each time."""

    @staticmethod
    def forward(ctx, tokens, index):
        ctx.save_for_backward(index)
        ctx.shape = tokens.shape
        return tokens.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return gradient.new_zeros(ctx.shape, dtype=wide).index_add_(0, index, gradient.to(wide)).to(gradient.dtype), None


def flash_kernel() -> Kernel:
    """torch's own variable-length FlashAttention, else the flash-attn package's. Raises ValueError where there is neither."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen_attn = None
    if varlen_attn is not None and {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():

        def run(q, k, v, cu_q, cu_k, longest_q, longest_k, scaling):
            _refuse_wide(q)
            grouped = q.shape[1] != k.shape[1]
            return varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, scale=scaling, window_size=(-1, 0), enable_gqa=grouped)

        return run
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise ValueError("this torch has no variable-length attention, and flash-attn is not installed: use attention=flex or sliced") from error

    def run_package(q, k, v, cu_q, cu_k, longest_q, longest_k, scaling):
        _refuse_wide(q)
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest_q, longest_k, softmax_scale=scaling, causal=True)

    return run_package


def _refuse_wide(query: torch.Tensor) -> None:
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"flash computes in bfloat16 or float16 only, the model's attention is in {query.dtype}: use attention=flex or sliced")
