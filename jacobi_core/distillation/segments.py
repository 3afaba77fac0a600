"""`flash`: the groups of a re-ordered batch, each with exactly its keys, as one variable-length causal call per layer.

A group's queries stand at the end of its keys (bottom-right causal). Every group has its own copy of the clean prefix before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.model_order import Layout, Span
from jacobi_core.distillation.packing import PackedRow

COPIES = 4  # most keys per token: beyond it the copies cost more than the kernel saves

# (q [T_q, H, D], k and v [T_k, H_kv, D], cu_q and cu_k int32 [groups + 1], longest q, longest k, scaling) -> [T_q, H, D]
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, float | None], torch.Tensor]


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
        """batch: fields [B, L], in `model_order`. Raises ValueError where keys would be copied more than `copies` times."""
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
            raise ValueError(
                f"flash copies the clean prefix for each of the {len(groups)} groups of this batch, {sum(k_sizes) / tokens:.1f} keys per token "
                f"(at most {copies} are sensible): use attention=flex or sliced, a longer window, or shorter answers"
            )
        device = batch.input_ids.device
        keys = torch.cat([torch.arange(start, end) for _, spans in groups for start, end in spans]).to(device)
        cu_q, cu_k = (torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32) for sizes in (q_sizes, k_sizes))
        return cls(tuple(batch.input_ids.shape), keys, cu_q, cu_k, (max(q_sizes), max(k_sizes)), kernel)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None, dropout: float
    ) -> torch.Tensor:
        """As Plan has it. Raises ValueError for dropout."""
        if dropout:
            raise ValueError("flash has no dropout in its variable-length kernel: set attention_dropout=0, or use attention=sliced")
        q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
        out = self.kernel(q, k.index_select(0, self.keys), v.index_select(0, self.keys), self.cu_q, self.cu_k, *self.longest, scaling)
        return out.view(*self.shape, *out.shape[1:])


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
