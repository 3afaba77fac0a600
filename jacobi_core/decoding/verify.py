"""The greedy rule: how much of a draft one forward has verified (algorithm section 1)."""

from __future__ import annotations

import torch


def accepted_length(draft: torch.Tensor, predictions: torch.Tensor) -> int:
    """Length a of the longest prefix of draft [n-1] equal to the predictions [n]; predictions[:a+1] are then exact."""
    wrong = (draft != predictions[:-1]).nonzero()
    return int(wrong[0]) if len(wrong) else len(draft)
