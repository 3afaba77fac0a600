"""How much of what is proposed to feed: as many tokens as make the text grow fastest, by the running acceptance and the machine's latency
curve. It cuts proposals and never makes any, so it cannot change the text, only the number and the width of the forwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jacobi_core.decoding.latency import LatencyCurve

if TYPE_CHECKING:
    from jacobi_core.decoding.text import Chain

DECAY = 0.95  # weight of what was seen one forward earlier: a source that failed is tried again after a while
FIRST, NEXT = 0.5, 0.8  # believed before anything is seen, with the weight of one try: the chances of Acceptance


@dataclass
class Acceptance:
    """Of one source: how often its first token is accepted, and each further one once the one before it is (Jacobi drafts come right in
    runs, so one rate would fit neither). Pairs of weights: accepted, tried."""

    first: tuple[float, float] = (FIRST, 1.0)
    further: tuple[float, float] = (NEXT, 1.0)

    def survivals(self, length: int) -> list[float]:
        """Chance that at least 1, 2, ... length tokens are accepted."""
        chance, following, found = self.first[0] / self.first[1], self.further[0] / self.further[1], []
        for _ in range(length):
            found.append(chance)
            chance *= following
        return found

    def fade(self) -> None:
        self.first = tuple(prior + DECAY * (seen - prior) for seen, prior in zip(self.first, (FIRST, 1.0), strict=True))
        self.further = tuple(prior + DECAY * (seen - prior) for seen, prior in zip(self.further, (NEXT, 1.0), strict=True))

    def observe(self, accepted: int, length: int) -> None:
        """The first `accepted` of `length` >= 1 tokens were right."""
        self.first = (self.first[0] + (accepted > 0), self.first[1] + 1)
        if accepted and length > 1:
            self.further = (self.further[0] + accepted - 1, self.further[1] + min(accepted, length - 1))


class Pace:
    """Cuts proposals for texts that are decoded together."""

    def __init__(self, latency: LatencyCurve, *, rows: int = 1) -> None:
        """rows: texts in one forward, each of which feeds about as much."""
        self._latency, self._rows = latency, rows
        self._sources: defaultdict[tuple[str, bool], Acceptance] = defaultdict(Acceptance)

    def cut(self, chains: Sequence[Chain]) -> list[Chain]:
        """The main draft, perhaps to nothing, and those of the others that pay beside it."""
        kept: list[Chain] = []
        failing: list[float] = []  # chance that no kept chain has its first k + 1 tokens accepted
        expected, fed, rate = 1.0, 1, 1 / self._latency.at(self._rows)
        for chain in chains:
            survivals = self._of(chain).survivals(len(chain.tokens))
            gains = [s * (failing[k] if k < len(failing) else 1.0) for k, s in enumerate(survivals)]
            width, best = 0, rate
            for tried in _widths(len(gains)):
                there = (expected + sum(gains[:tried])) / self._latency.at(self._rows * (fed + tried))
                if there > best:
                    width, best = tried, there
            if width or not kept:
                kept.append(replace(chain, tokens=chain.tokens[:width]))
                failing = [
                    (failing[k] if k < len(failing) else 1.0) * (1 - survivals[k] if k < width else 1.0) for k in range(max(width, len(failing)))
                ]
                expected, fed, rate = expected + sum(gains[:width]), fed + width, best
        return kept

    def observe(self, chains: Sequence[Chain], accepted: Sequence[int]) -> None:
        """What became of the chains of a forward."""
        for acceptance in self._sources.values():
            acceptance.fade()
        for chain, count in zip(chains, accepted, strict=True):
            if chain.tokens:
                self._of(chain).observe(count, len(chain.tokens))

    def _of(self, chain: Chain) -> Acceptance:
        return self._sources[chain.source, bool(chain.draft)]  # the main draft is better than the ones beside it


def _widths(length: int) -> list[int]:
    """1, 3, 7, ... tokens: forwards of a power of two with the committed one; and all of them."""
    found = [2**k - 1 for k in range(1, length.bit_length() + 1) if 2**k - 1 < length]
    return [*found, length] if length else []
