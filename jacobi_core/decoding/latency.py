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
    """seconds[i]: a forward that feeds tokens[i] (ascending, from 1) per text, its choices on the host; never falling. beside: seconds that
    feeding them in several chains adds, for the mask and what goes with it."""

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

    def free_tokens(self, ratio: float) -> int:
        """Most tokens, up to the widest forward measured, that take at most `ratio` times as long as one."""
        allowed = ratio * self.seconds[0]
        return max(m for m in range(1, self.tokens[-1] + 1) if m == 1 or self.at(m) <= allowed)

    def knee(self) -> float:
        """Tokens at which the line through the two widest forwards meets the latency of one token: below it a forward waits for the weights,
        beyond it every token costs. Between 1 and the widest forward measured, which also stands for "not reached"."""
        if len(self.tokens) == 1 or self.seconds[-1] <= self.seconds[-2]:
            return float(self.tokens[-1])
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        return min(max(self.tokens[-1] - (self.seconds[-1] - self.seconds[0]) / slope, 1.0), float(self.tokens[-1]))


def tokens_held(widths: Sequence[int], *, context: int = CONTEXT) -> int:
    """Most tokens that a cache holds at the end of `measure_latency`, per text: every forward leaves one behind, those of `beside` too."""
    return context + REPEATS * (len(widths) + 1)


@torch.inference_mode()
def measure_latency(forward: Forward, widths: Sequence[int], *, context: int = CONTEXT, rows: int = 1, limit: float | None = None) -> LatencyCurve:
    """Feed every width REPEATS times behind `context` tokens; the quickest counts, since only a disturbance makes one slower.

    rows: texts side by side, which the forward must take. limit: seconds; no width is tried beyond the first that takes longer, but always
    two, since from one nothing can be said about any other; and a width that has taken so long in all is fed no third time.
    """
    forward.logits_of([([0] * context, [[]])] * rows)
    forward.keep([(0, 0)] * rows)

    def best(chains: list[list[int]]) -> float:
        times = []
        while len(times) < REPEATS and (len(times) < 2 or limit is None or sum(times) < limit):
            start = time.perf_counter()
            for logits in forward.logits_of([([0], chains)] * rows):
                logits.argmax(-1).tolist()
            times.append(time.perf_counter() - start)
            forward.keep([(0, 0)] * rows)
        return min(times)

    seconds: list[float] = []
    for width in widths:
        seconds.append(max(best([[0] * (width - 1)]), seconds[-1] if seconds else 0.0))
        if limit is not None and seconds[-1] > limit and len(seconds) > 1:
            break
    widest = widths[len(seconds) - 1]
    beside = best([[0] * (widest - 2), [0]]) - seconds[-1] if widest > 1 else 0.0
    return LatencyCurve(tuple(widths[: len(seconds)]), tuple(seconds), max(beside, 0.0))


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to the first that is at least `most`."""
    return [2**k for k in range((most - 1).bit_length() + 1)]
