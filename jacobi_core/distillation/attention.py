"""Who may see whom in a packed row: one rule, written once, and its dense mask (algorithm section 4; paper figure 2).

Every backend takes its masks from here: dense and chunk masks by broadcasting, flex one pair at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.packing import Kind, PackedRow

# plain integers: torch.compile, which flex uses, takes tensor == IntEnum member to be False, without a word (torch 2.13)
_PROMPT, _NOISY, _CLEAN = (int(kind) for kind in (Kind.PROMPT, Kind.NOISY, Kind.CLEAN))


class TokenFields(NamedTuple):
    """What the rule asks about a token: long tensors of one shape, fields of PackedRow."""

    sample: torch.Tensor
    kind: torch.Tensor
    block: torch.Tensor
    window: torch.Tensor
    position_ids: torch.Tensor

    @classmethod
    def of(cls, batch: PackedRow) -> TokenFields:
        return cls(*(getattr(batch, name) for name in cls._fields))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenFields:
        return TokenFields(*(change(field) for field in self))


def visible(*, queries: TokenFields, keys: TokenFields, variant: MaskVariant) -> torch.Tensor:
    """bool: may the query token see the key token? The fields of both broadcast against each other.

    Padding sees padding only, so that no query is left without a key.
    """
    q, k = queries, keys
    earlier = k.position_ids <= q.position_ids
    noisy_q, noisy_k, clean_k = q.kind == _NOISY, k.kind == _NOISY, k.kind == _CLEAN
    prompt = (k.kind == _PROMPT) & earlier
    causal = (q.kind == _CLEAN) & clean_k & earlier
    group_q, group_k = (q.window, k.window) if variant is MaskVariant.nc else (q.block, k.block)
    noisy = noisy_q & ((clean_k & (group_k < group_q)) | (noisy_k & (group_k == group_q) & earlier))
    return (k.sample == q.sample) & (prompt | causal | noisy)


def dense_mask(batch: PackedRow, variant: MaskVariant = MaskVariant.nc) -> torch.Tensor:
    """bool [B, 1, L, L], True = attend, for a batch of rows [B, L]. The oracle of every other backend."""
    fields = TokenFields.of(batch)
    return visible(queries=fields.map(lambda f: f[:, None, :, None]), keys=fields.map(lambda f: f[:, None, None, :]), variant=variant)
