"""The mask that flex attention takes. Knows nothing about models."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def block_mask(visible: torch.Tensor) -> BlockMask:
    """`visible`, bool [B, 1, q, k] (True = attend), as transformers' flex attention must be given it: a dense boolean mask would be
    added to the scores there, and be silently wrong."""
    rows, _, queries, keys = visible.shape

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return visible[row, 0, query, key]

    return create_block_mask(sees, B=rows, H=1, Q_LEN=queries, KV_LEN=keys, device=visible.device)
