"""`jacobi_packed`: the attention implementation, in transformers' sense, through which a model attends by a plan. No model class is touched.

The plan travels as a keyword argument of the model's forward. Without one the implementation is transformers' sdpa, so that such a model decodes
as any other.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

IMPLEMENTATION = "jacobi_packed"


class Plan(Protocol):
    """Who sees whom in one batch of `shape` [B, L], in the form a backend computes with; the same for all layers."""

    shape: tuple[int, int]

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None, dropout: float
    ) -> torch.Tensor:
        """query [B, H, L, D], key and value [B, H_kv, L, D] -> [B, L, H, D], anything finite at padding. module: the attention layer."""


def plan_arguments(plan: Plan, device: torch.device) -> dict[str, Any]:
    """What a model's forward must be given.

    The mask has no element: transformers hands a 4D mask on as it is, instead of building one, and a model that loses the plan is found by it.
    """
    return {"attention_mask": torch.empty(0, 0, 0, 0, dtype=torch.bool, device=device), "packed_plan": plan}


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_plan: Plan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' interface. Raises ValueError for what a plan cannot honour and for a mask of the wrong kind."""
    layer = type(module).__name__
    if isinstance(attention_mask, BlockMask):
        raise ValueError(f"{layer}: attention_mask is a BlockMask, which {IMPLEMENTATION} takes only inside a FlexPlan; a plain mask is a tensor")
    lost = attention_mask is not None and attention_mask.numel() == 0
    if packed_plan is None and not lost:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if packed_plan is None:
        raise ValueError(f"{layer} did not get its batch's plan: this model keeps keyword arguments from its attention; use attention=dense")
    if not hasattr(packed_plan, "attend"):
        raise ValueError(f"{layer}: packed_plan is a {type(packed_plan).__name__}, not a plan; take the arguments that PackedAttention returns")
    if not lost:
        raise ValueError(f"{layer} got a plan and an attention_mask besides; the plan says all, leave the mask as PackedAttention returned it")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{layer} asks for {name}, which attention over packed rows does not have")
    if (found := (query.shape[0], query.shape[2])) != packed_plan.shape or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{layer}: the plan is for a batch of {packed_plan.shape}, got {found} tokens and {key.shape[2]} keys; use_cache must be off"
        )
    # under autocast only values are still narrow, queries and keys went through rotary positions in float32
    value = value.to(query.dtype)
    return packed_plan.attend(module, query, key, value, scaling=scaling, dropout=dropout), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, AttentionMaskInterface()["sdpa"])
