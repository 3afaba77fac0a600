"""The greedy rule: how much of a draft one forward has verified (algorithm section 1). On the host: a draft is at most a few blocks."""

from __future__ import annotations

from collections.abc import Sequence


def accepted_length(draft: Sequence[int], predictions: Sequence[int]) -> int:
    """Length a of the longest prefix of the draft equal to the predictions, which are one longer; predictions[:a+1] are then exact."""
    for i, (token, predicted) in enumerate(zip(draft, predictions, strict=False)):
        if token != predicted:
            return i
    return len(draft)
