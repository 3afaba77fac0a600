"""The dense mask of a packed batch, by the one rule of `visibility`.

Every backend takes its masks from there: dense and chunk masks by broadcasting, flex one pair at a time.
"""

from __future__ import annotations

import torch

from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.packing import PackedRow
from jacobi_core.distillation.visibility import TokenFields, visible


def dense_mask(batch: PackedRow, variant: MaskVariant = MaskVariant.nc) -> torch.Tensor:
    """bool [B, 1, L, L], True = attend, for a batch of rows [B, L]. The oracle of every other backend."""
    fields = TokenFields.of(batch)
    return visible(queries=fields.map(lambda f: f[:, None, :, None]), keys=fields.map(lambda f: f[:, None, None, :]), variant=variant)
