"""How far TPF could have come out otherwise with other prompts of the same kind. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Sequence

DRAWS = 2000
SHARE = 0.95
FEWEST = 4  # prompts


def tpf_interval(prompts: Sequence[tuple[int, int]], *, seed: int = 0) -> tuple[float, float] | None:
    """The middle SHARE of the TPF (total tokens over total forwards) of DRAWS samples of as many prompts, drawn with replacement.

    prompts: (tokens, forwards) of each. None for too few to say anything.
    """
    if len(prompts) < FEWEST:
        return None
    draw, found = random.Random(seed), []
    for _ in range(DRAWS):
        tokens, forwards = (sum(numbers) for numbers in zip(*draw.choices(prompts, k=len(prompts)), strict=True))
        found.append(tokens / forwards)
    found.sort()
    cut = round(DRAWS * (1 - SHARE) / 2)
    return found[cut], found[-1 - cut]
