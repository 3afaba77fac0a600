"""One text while it is decoded: what to feed next, and what a forward's predictions mean for it. Knows nothing about models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Proposes chains, reads predictions, commits, and stops exactly at EOS, where the caller's `stops` says so, or at the cap."""

    def __init__(
        self,
        prompt: torch.Tensor,
        config: DecodingConfig,
        rules: TokenRules,
        *,
        prompt_id: int,
        stops: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        """stops: does a text (prompt and answer) that ends with its latest token end there? Asked for every committed token in turn."""
        self._stops = stops
        self.config, self.rules, self.stats = config, rules, DecodingStats()
        self.answer: list[int] = []
        self.prompt = prompt.tolist()
        self.uncached = self.prompt  # committed tokens the cache has not read: the whole prompt, afterwards one
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

    def places(self, chains: Sequence[Chain], *, with_prefixes: bool) -> tuple[list[int], list[list[int]] | None]:
        """Answer index of every prediction of a forward (after the committed text, then chain by chain), and the text before each."""
        done = len(self.answer)
        positions = [done, *(done + i + 1 for chain in chains for i in range(len(chain.tokens)))]
        if not with_prefixes:
            return positions, None
        text = [*self.prompt, *self.answer]
        return positions, [text, *([*text, *chain.tokens[: i + 1]] for chain in chains for i in range(len(chain.tokens)))]

    @staticmethod
    def read(chains: Sequence[Chain], chosen: Sequence[int]) -> list[list[int]]:
        """What a forward chose at its places, as predictions per chain."""
        predictions, at = [], 1
        for chain in chains:
            predictions.append([chosen[0], *chosen[at : at + len(chain.tokens)]])
            at += len(chain.tokens)
        return predictions

    def receive(self, chains: Sequence[Chain], predictions: Sequence[Sequence[int]]) -> Verdict | None:
        """predictions[i]: what the model says after the last committed token and after each token of chains[i].

        Commits the longest verified chain and the prediction after it. None once the text has ended (stats.stop_reason).
        """
        lengths = [accepted_length(chain.tokens, p) for chain, p in zip(chains, predictions, strict=True)]
        winner = max(range(len(chains)), key=lambda i: (lengths[i], -i))
        accepted, predicted = lengths[winner], predictions[winner]
        commit = predicted[: accepted + 1]
        done = len(self.answer)
        ends = next((i for i in range(len(commit)) if self._ends_at(commit, i)), None)
        if ends is not None:
            commit = commit[: ends + 1]
        self.answer += commit
        self.stats.count(len(commit), chains[winner].source)
        if ends is not None or len(self.answer) == self.config.max_new_tokens:
            self.stats.stop_reason = "length" if ends is None else "eos" if commit[-1] in self.rules.eos_ids else "criteria"
            return None
        self._remember(chains[0].tokens, predictions[0], predicted, commit, done)
        return Verdict(winner, accepted)

    def _ends_at(self, commit: Sequence[int], i: int) -> bool:
        if commit[i] in self.rules.eos_ids:
            return True
        return self._stops is not None and self._stops([*self.prompt, *self.answer, *commit[: i + 1]])

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
