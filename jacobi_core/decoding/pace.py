"""How much of what is proposed to feed: as many tokens as make the text grow fastest, by the running acceptance and the machine's latency
curve. It cuts proposals and never makes any, so it cannot change the text, only the number and the width of the forwards.

A candidate is worth what it commits now. A refreshed draft is worth more: what is fed today comes right tomorrow. So its width is
judged by what forwards of that width have committed, not by the acceptance of its tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jacobi_core.decoding.latency import LatencyCurve

if TYPE_CHECKING:
    from jacobi_core.decoding.text import Chain

DECAY = 0.99  # weight of what was seen one forward earlier: what failed is tried again after a while
FIRST, NEXT = 0.5, 0.8  # believed before anything is seen, with the weight of one try: the chances of Acceptance
GROWTH = 1.4  # believed before anything is seen, with the weight of PRIOR forwards: tokens per forward, at twice the width
PRIOR = 4.0
SPARE = 1.1  # further drafts are fed where the forward takes at most this much longer with them


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

    def fade(self, decay: float) -> None:
        self.first = tuple(prior + decay * (seen - prior) for seen, prior in zip(self.first, (FIRST, 1.0), strict=True))
        self.further = tuple(prior + decay * (seen - prior) for seen, prior in zip(self.further, (NEXT, 1.0), strict=True))

    def observe(self, accepted: int, length: int) -> None:
        """The first `accepted` of `length` >= 1 tokens were right."""
        self.first = (self.first[0] + (accepted > 0), self.first[1] + 1)
        if accepted and length > 1:
            self.further = (self.further[0] + accepted - 1, self.further[1] + min(accepted, length - 1))


class Widths:
    """Tokens per forward, by its width (committed token and main draft): of every power of two up to the widest seen."""

    def __init__(self) -> None:
        self._committed: list[float] = []  # by power of two: tokens committed by forwards at least that wide, had they been that wide
        self._forwards: list[float] = []

    def expected(self, width: int) -> list[tuple[int, float]]:
        """(width, tokens per forward) for 1, 2, 4, ... and `width`. Where nothing is known, more than at half of it."""
        found = [(1, 1.0)]
        for power in range(1, width.bit_length() + (width & (width - 1) > 0)):
            seen, forwards = (self._committed[power], self._forwards[power]) if power < len(self._forwards) else (0.0, 0.0)
            found.append((min(2**power, width), (PRIOR * GROWTH * found[-1][1] + seen) / (PRIOR + forwards)))
        return found

    def observe(self, width: int, committed: int, decay: float) -> None:
        grown = width.bit_length() - len(self._forwards)
        self._committed += [0.0] * grown
        self._forwards += [0.0] * grown
        for power in range(len(self._forwards)):
            tried = 2**power <= width
            self._committed[power] = decay * self._committed[power] + tried * min(committed, 2**power)
            self._forwards[power] = decay * self._forwards[power] + tried


class Pace:
    """Cuts proposals for texts that are decoded together, and for those after them: what it has learnt about a model it keeps."""

    def __init__(self, latency: LatencyCurve, *, rows: int = 1) -> None:
        """rows: texts in one forward. latency: of such forwards, by the tokens that each of them feeds."""
        self.latency, self.rows = latency, rows
        self._widths = Widths()
        self._sources: defaultdict[str, Acceptance] = defaultdict(Acceptance)

    def cut(self, chains: Sequence[Chain]) -> list[Chain]:
        """The main draft, perhaps to nothing; further drafts where there is room; and candidates that pay beside them."""
        main, *others = chains
        width, expected = max(self._widths.expected(1 + len(main.tokens)), key=lambda w: w[1] / self._seconds(w[0]))
        kept, fed = [replace(main, tokens=main.tokens[: width - 1])], width
        failing = [1 - s for s in self._sources[main.source].survivals(width - 1)]  # chance that no kept chain has its first k + 1 tokens accepted
        for chain in others:
            length = len(chain.tokens)
            if chain.draft is not None:
                if self._seconds(fed + length, chains=2) <= SPARE * self._seconds(width):
                    kept.append(chain)
                    fed += length
                continue
            failing += [1.0] * (length - len(failing))
            survivals = self._sources[chain.source].survivals(length)
            _, length, gain = max(
                ((expected + gain) / self._seconds(fed + n, chains=len(kept) + (n > 0)), n, gain) for n, gain in _gains(survivals, failing)
            )
            if length:
                kept.append(replace(chain, tokens=chain.tokens[:length]))
                failing[:length] = [f * (1 - s) for f, s in zip(failing, survivals[:length], strict=False)]
                expected, fed = expected + gain, fed + length
        return kept

    def observe(self, chains: Sequence[Chain], accepted: Sequence[int]) -> None:
        """What became of a text's chains in a forward; one of `rows` texts in it, each of which is told of."""
        decay = DECAY ** (1 / self.rows)
        self._widths.observe(1 + len(chains[0].tokens), 1 + accepted[0], decay)
        for acceptance in self._sources.values():
            acceptance.fade(decay)
        for chain, count in zip(chains, accepted, strict=True):
            if chain.tokens and not chain.draft:
                self._sources[chain.source].observe(count, len(chain.tokens))

    def _seconds(self, fed: int, *, chains: int = 1) -> float:
        return self.latency.at(fed) + (self.latency.beside if chains > 1 else 0.0)


def _gains(survivals: Sequence[float], failing: Sequence[float]) -> list[tuple[int, float]]:
    """(tokens of a candidate, tokens it is expected to commit more) for none, 1, 3, 7, ... and all of them."""
    length = len(survivals)
    tried = [0, *(2**k - 1 for k in range(1, length.bit_length() + 1) if 2**k - 1 < length), *([length] if length else [])]
    return [(n, sum(s * f for s, f in zip(survivals[:n], failing, strict=False))) for n in tried]
