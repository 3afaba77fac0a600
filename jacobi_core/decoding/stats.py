"""What a decoding run did, in the field's terms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch


@dataclass
class DecodingStats:
    """Counts of one generation; the first forward (prompt + first draft) is counted."""

    committed_per_forward: list[int] = field(default_factory=list)
    accepted_from: Counter[str] = field(default_factory=Counter)  # committed tokens by source: draft, recycled, ngram
    stop_reason: str = ""  # "eos", "length", or "criteria" (a stop string or another of the caller's)

    def count(self, committed: int, source: str) -> None:
        """One forward."""
        self.committed_per_forward.append(committed)
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

    def histogram(self) -> dict[int, int]:
        """How many forwards committed k tokens, by k."""
        return dict(sorted(Counter(self.committed_per_forward).items()))


@dataclass
class Generation:
    """new_tokens: long [t] on the CPU, EOS included where the text ended with one."""

    new_tokens: torch.Tensor
    stats: DecodingStats
