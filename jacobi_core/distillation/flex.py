"""`flex`: FlexAttention with a block mask made of the rule, through transformers' own flex_attention function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface

from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.packing import PackedRow
from jacobi_core.distillation.visibility import TokenFields, visible


@dataclass(frozen=True)
class FlexPlan:
    """A batch's block mask, one for all heads and layers. Raises ValueError for a mask of another kind: a tensor would be added to the scores."""

    mask: BlockMask

    def __post_init__(self) -> None:
        if not isinstance(self.mask, BlockMask):
            raise ValueError(
                f"flex takes a BlockMask, got a {type(self.mask).__name__}; rule_block_mask makes one, dense_mask is for attention=dense"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.mask.shape[0], self.mask.shape[-1]

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float | None, dropout: float
    ) -> torch.Tensor:
        """As Plan has it."""
        return AttentionInterface()["flex_attention"](module, query, key, value, self.mask, scaling=scaling, dropout=dropout)[0]


def rule_block_mask(batch: PackedRow, variant: MaskVariant, *, create: Callable[..., BlockMask] | None = None) -> BlockMask:
    """The rule for batch fields [B, L] as a block mask, heads broadcast. In `model_order` most of its tiles are empty or full.

    The rule closes over tensors alone, so that what is compiled for one batch serves all batches of its shape.
    """
    fields = TokenFields.of(batch).map(torch.Tensor.int)  # half of what the kernel has to read
    rows, length = batch.input_ids.shape

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return visible(queries=fields.map(lambda f: f[row, query]), keys=fields.map(lambda f: f[row, key]), variant=variant)

    create = create or (_compiled() if batch.input_ids.is_cuda else create_block_mask)
    return create(sees, B=rows, H=None, Q_LEN=length, KV_LEN=length, device=batch.input_ids.device)


@cache
def _compiled() -> Callable[..., BlockMask]:
    """Uncompiled it would hold the rule for every pair at once, L x L. From the second shape on torch compiles for any."""
    return torch.compile(create_block_mask)
