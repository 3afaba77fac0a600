"""How long a forward over m tokens takes on this machine: what decides how much drafting pays. Knows nothing about texts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jacobi_core.decoding.forwards import Forward

CONTEXT = 64  # tokens in the cache while measuring
REPEATS = 5


@dataclass(frozen=True)
class LatencyCurve:
    """seconds[i]: a forward that feeds tokens[i] (ascending, from 1), its logits on the host; never falling. beside: seconds that feeding them
    in several chains adds, for the mask and what goes with it."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    beside: float = 0.0

    def at(self, tokens: int) -> float:
        """Seconds; a straight line between two measured points, and on from the last two."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        i = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        share = (tokens - self.tokens[i - 1]) / (self.tokens[i] - self.tokens[i - 1])
        return self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])


def tokens_held(widths: Sequence[int]) -> int:
    """Tokens that a cache holds at the end of `measure_latency`: every forward leaves one behind, those of `beside` too."""
    return CONTEXT + REPEATS * (len(widths) + 1)


@torch.inference_mode()
def measure_latency(forward: Forward, widths: Sequence[int]) -> LatencyCurve:
    """Feed every width REPEATS times behind CONTEXT tokens; the quickest counts, since only a disturbance makes one slower."""
    forward.logits_of([([0] * CONTEXT, [[]])])
    forward.keep([(0, 0)])

    def best(chains: list[list[int]]) -> float:
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            forward.logits_of([([0], chains)])[0].argmax(-1).tolist()
            times.append(time.perf_counter() - start)
            forward.keep([(0, 0)])
        return min(times)

    seconds: list[float] = []
    for width in widths:
        seconds.append(max(best([[0] * (width - 1)]), seconds[-1] if seconds else 0.0))
    beside = best([[0] * (widths[-1] - 2), [0]]) - seconds[-1] if widths[-1] > 1 else 0.0
    return LatencyCurve(tuple(widths), tuple(seconds), max(beside, 0.0))


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to the first that is at least `most`."""
    return [2**k for k in range((most - 1).bit_length() + 1)]
