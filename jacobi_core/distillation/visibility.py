"""Who may see whom in a packed row: one rule, written once (algorithm section 4; paper figure 2). Free of torch.

It asks for arithmetic only, so that tensors and numpy arrays serve alike: training masks by it, and what draws a mask draws this one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from jacobi_core.distillation.attention_variant import MaskVariant

if TYPE_CHECKING:
    from jacobi_core.distillation.packing import PackedRow


class Kind(IntEnum):
    """Of a token of a packed row."""

    PROMPT = 0
    NOISY = 1
    CLEAN = 2


# plain integers: torch.compile, which flex uses, takes tensor == IntEnum member to be False, without a word (torch 2.13)
_PROMPT, _NOISY, _CLEAN = (int(kind) for kind in (Kind.PROMPT, Kind.NOISY, Kind.CLEAN))


class TokenFields(NamedTuple):
    """What the rule asks about a token: integer tensors or arrays of one shape, fields of PackedRow."""

    sample: Any
    kind: Any
    block: Any
    window: Any
    position_ids: Any

    @classmethod
    def of(cls, batch: PackedRow) -> TokenFields:
        return cls(*(getattr(batch, name) for name in cls._fields))

    def map(self, change: Callable[[Any], Any]) -> TokenFields:
        return TokenFields(*(change(field) for field in self))


def visible(*, queries: TokenFields, keys: TokenFields, variant: MaskVariant) -> Any:
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
