"""Timing of two or more things side by side: interleaved, warmed up, medians over prompts. Knows nothing about decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


def seconds(work: Callable[[], T]) -> tuple[float, T]:
    """Wall seconds, and what it returned."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


@dataclass
class Run:
    """Of one contestant on every prompt: tokens, forwards (0 where nobody counted) and seconds, prompt by prompt."""

    tokens: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def tpf(self) -> float:
        return sum(self.tokens) / sum(self.forwards)

    @property
    def tps(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def times_faster_than(self, other: Run) -> float:
        """Median over prompts of the ratio of tokens per second."""
        pairs = zip(self.tokens, self.seconds, other.tokens, other.seconds, strict=True)
        return statistics.median((t / s) / (u / r) for t, s, u, r in pairs)


def side_by_side(contestants: Mapping[str, Callable[[Any], tuple[int, int, float]]], items: Sequence[Any], *, repeats: int = 3) -> dict[str, Run]:
    """Every contestant on every item, taking turns, each time another one first; the quickest of `repeats` counts, after one to warm up.

    A contestant returns (tokens, forwards, seconds): it keeps its own time, so that one may be another process.
    """
    runs = {name: Run() for name in contestants}
    for name in contestants:
        contestants[name](items[0])
    for item in items:
        best: dict[str, tuple[int, int, float]] = {}
        for turn in range(repeats):
            order = list(contestants)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                found = contestants[name](item)
                if name not in best or found[2] < best[name][2]:
                    best[name] = found
        for name, (tokens, forwards, took) in best.items():
            runs[name].tokens.append(tokens)
            runs[name].forwards.append(forwards)
            runs[name].seconds.append(took)
    return runs
