"""One text while it is decoded: what to feed next, and what a forward's predictions mean for it. Knows nothing about models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from jacobi_core.decoding.blocks import Horizon
from jacobi_core.decoding.candidates import NgramIndex, RejectedPool
from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.drafts import ContextDrafts
from jacobi_core.decoding.stats import DecodingStats
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.decoding.verify import accepted_length

DRAFT, RECYCLED, NGRAM = "draft", "recycled", "ngram"


@dataclass(frozen=True)
class Chain:
    """Tokens proposed to follow the last committed one, and where they come from."""

    tokens: Sequence[int]
    source: str


@dataclass(frozen=True)
class Verdict:
    """winner: index of the chain whose first `accepted` tokens are committed (and one prediction after them)."""

    winner: int
    accepted: int


class Text:
    """Proposes chains, reads predictions, commits, and stops exactly at EOS or the cap."""

    def __init__(self, prompt: torch.Tensor, config: DecodingConfig, rules: TokenRules, *, prompt_id: int) -> None:
        self.config, self.rules, self.stats = config, rules, DecodingStats()
        self.answer: list[int] = []
        self.uncached = prompt.tolist()  # committed tokens the cache has not read: the whole prompt, afterwards one
        self._drafts = ContextDrafts(prompt, prompt_id=prompt_id, seed=config.seed, rules=rules, capacity=config.max_new_tokens)
        self._horizon = Horizon(config)
        self._refreshed: Sequence[int] = []  # predictions for the tokens after the committed ones
        self._pool = RejectedPool(config.pool_size) if config.recycles else None
        self._ngrams = NgramIndex(self.uncached) if config.ngram else None

    def propose(self) -> list[Chain]:
        """The refreshed draft, topped up at random, and beside it up to verification_size - 1 candidates."""
        done, c = len(self.answer), self.config
        width = min(self._horizon.end(done), c.max_new_tokens) - done  # tokens this forward may commit
        known = list(self._refreshed[: width - 1])
        missing = width - 1 - len(known)
        if missing:
            known += self._drafts.draw(done + len(known), missing).tolist()
        chains = [Chain(known, DRAFT)]
        if c.candidates:
            for chain in self._candidates(width - 1):
                if all(list(chain.tokens) != list(other.tokens[: len(chain.tokens)]) for other in chains):
                    chains.append(chain)
                    if len(chains) > c.candidates:
                        break
        return chains

    def _candidates(self, length: int) -> Iterator[Chain]:
        if length < 1:
            return
        sources = []
        if self._ngrams is not None:
            sources.append(Chain(t, NGRAM) for t in self._ngrams.continuations(length))
        if self._pool is not None:
            sources.append(Chain(t[:length], RECYCLED) for t in self._pool.continuations(self.uncached[-1]))
        while sources:  # in turn, so that no source takes the whole budget
            for source in list(sources):
                chain = next(source, None)
                if chain is None:
                    sources.remove(source)
                else:
                    yield chain

    def receive(self, chains: Sequence[Chain], predictions: Sequence[Sequence[int]]) -> Verdict | None:
        """predictions[i]: what the model says after the last committed token and after each token of chains[i].

        Commits the longest verified chain and the prediction after it. None once the text has ended (stats.stop_reason).
        """
        lengths = [accepted_length(chain.tokens, p) for chain, p in zip(chains, predictions, strict=True)]
        winner = max(range(len(chains)), key=lambda i: (lengths[i], -i))
        accepted, predicted = lengths[winner], predictions[winner]
        commit = predicted[: accepted + 1]
        done = len(self.answer)
        ends = next((i for i, token in enumerate(commit) if token in self.rules.eos_ids), None)
        if ends is not None:
            commit = commit[: ends + 1]
        self.answer += commit
        self.stats.count(len(commit), chains[winner].source)
        if ends is not None or len(self.answer) == self.config.max_new_tokens:
            self.stats.stop_reason = "eos" if ends is not None else "length"
            return None
        self._remember(chains[0].tokens, predictions[0], predicted, commit, done)
        return Verdict(winner, accepted)

    def _remember(self, draft: Sequence[int], refreshed: Sequence[int], predicted: Sequence[int], commit: Sequence[int], done: int) -> None:
        committed = len(commit)
        # behind the winner's end the refreshed draft goes on: tokens that are right at their place stay right
        self._refreshed = [*predicted[committed:], *refreshed[max(committed, len(predicted)) :]]
        start = self._horizon.newest - done  # index in the draft; below 0 where the newest block is partly committed
        newest = committed - start if committed > start else accepted_length(draft[start:], refreshed[start:]) if start >= 0 else 0
        self._horizon.observe(len(self.answer), newest)
        if self._pool is not None:
            self._pool.add(refreshed[committed - 1 :])
        if self._ngrams is not None:
            self._ngrams.extend(commit)
        self._drafts.append(torch.tensor(commit))
        self.uncached = commit[-1:]
