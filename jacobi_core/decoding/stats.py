"""What a decoding run did, in the field's terms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch


@dataclass
class DecodingStats:
    """Counts of one generation; the first forward (prompt + first draft) is counted."""

    committed_per_forward: list[int] = field(default_factory=list)
    fed_per_forward: list[int] = field(default_factory=list)  # tokens the model read: committed ones, drafts and candidates
    accepted_from: Counter[str] = field(default_factory=Counter)  # committed tokens by source: draft, recycled, ngram
    stop_reason: str = ""  # "eos", "length", or "criteria" (a stop string or another of the caller's)

    def count(self, committed: int, source: str, *, fed: int) -> None:
        """One forward."""
        self.committed_per_forward.append(committed)
        self.fed_per_forward.append(fed)
        self.accepted_from[source] += committed

    @property
    def forwards(self) -> int:
        return len(self.committed_per_forward)

    @property
    def tokens(self) -> int:
        """Returned tokens, EOS included."""
        return sum(self.committed_per_forward)

    @property
    def tpf(self) -> float:
        """Tokens per forward."""
        return self.tokens / self.forwards

    @property
    def mean_acceptance_length(self) -> float:
        """Draft tokens accepted per forward; the one token that every forward yields anyway is not counted."""
        return self.tpf - 1

    def accepted_by_position(self) -> list[float]:
        """Share of forwards that accepted at least k draft tokens, for k = 1, 2, ... up to the most accepted."""
        most = max(self.committed_per_forward, default=1)
        return [sum(committed > k for committed in self.committed_per_forward) / self.forwards for k in range(1, most)]

    def histogram(self) -> dict[int, int]:
        """How many forwards committed k tokens, by k."""
        return dict(sorted(Counter(self.committed_per_forward).items()))


@dataclass
class Generation:
    """new_tokens: long [t] on the CPU, EOS included where the text ended with one."""

    new_tokens: torch.Tensor
    stats: DecodingStats
