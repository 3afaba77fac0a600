"""One text for attention backends that take no mask (flash-attn): candidates side by side on the batch axis, all rows plainly causal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import LIKE_SDPA, CachedForward, Request


def takes_masks(model: PreTrainedModel) -> bool:
    """Can this model's attention implementation be given which token sees which?"""
    return model.config._attn_implementation in (*LIKE_SDPA, "eager", "flex_attention")


class BatchAxisForward(CachedForward):
    """CachedForward that never gives the model a mask.

    With one chain it is the same plain causal forward. With several the cache is repeated once per chain while the forward runs, and
    reduced to the winner's row after it: the price of a backend without masks.
    """

    def logits_of(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        ((committed, chains),) = requests
        self._begin = self.length + len(committed)
        if len(chains) == 1:
            return super().logits_of(requests)
        device, longest = self.model.device, max(map(len, chains))
        if len(committed) > 1:  # a prompt is read once, not once per chain
            self(torch.tensor([committed[:-1]], device=device), keep=1)
        self.cache.batch_repeat_interleave(len(chains))
        # padding stands on the right, where a causal row does not see it; rollback drops it
        rows = [[committed[-1], *chain, *[0] * (longest - len(chain))] for chain in chains]
        logits = self(torch.tensor(rows, device=device))
        return [torch.cat([logits[0, :1], *(logits[row, 1 : 1 + len(chain)] for row, chain in enumerate(chains))])]

    def keep(self, verdicts: Sequence[tuple[int, int] | None]) -> None:
        (verdict,) = verdicts
        if verdict is None:
            return
        chain, accepted = verdict
        self.rollback(self._begin + accepted)
        if self.cache.layers[0].keys.shape[0] > 1:
            self.select_rows(torch.tensor([chain], device=self.model.device))
