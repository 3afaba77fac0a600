"""One text while it is decoded: what to feed next, and what a forward's predictions mean for it. Knows nothing about models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from jacobi_core.decoding.blocks import Horizon
from jacobi_core.decoding.candidates import NgramIndex, RejectedPool
from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.drafts import ContextDrafts
from jacobi_core.decoding.pace import Pace
from jacobi_core.decoding.stats import DecodingStats
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.decoding.verify import accepted_length

DRAFT, RECYCLED, NGRAM = "draft", "recycled", "ngram"
SAME_END = 2  # tokens between the ends that two states of a draft foresee, for the end to be believed


@dataclass(frozen=True)
class Chain:
    """Tokens proposed to follow the last committed one, and where they come from. draft: which of the drafts it is, None for a candidate."""

    tokens: Sequence[int]
    source: str
    draft: int | None = None


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
        stops: Callable[[Sequence[int]], int | None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """stops: index of the first of these tokens, which come next, at which the text ends. Told every token but an EOS, once and in order.

        pace: cuts what is proposed to what pays.
        """
        self._stops, self._pace = stops, pace
        self.config, self.rules, self.stats = config, rules, DecodingStats()
        self.answer: list[int] = []
        self.prompt = prompt.tolist()
        self.uncached = self.prompt  # committed tokens the cache has not read: the whole prompt, afterwards one
        self._guesses = ContextDrafts(prompt, prompt_id=prompt_id, seed=config.seed, rules=rules, capacity=config.max_new_tokens)
        self._horizon = Horizon(config)
        self._drafts: list[list[int]] = [[] for _ in range(config.drafts)]  # each from the first uncommitted token on
        self._foreseen_end: int | None = None  # answer index of the first EOS in the main draft
        self._pool = RejectedPool(config.pool_size) if config.recycles else None
        self._ngrams = NgramIndex(self.uncached) if config.ngram else None

    def propose(self) -> list[Chain]:
        """The refreshed drafts, topped up at random, and candidates beside them up to verification_size; the main draft first."""
        done, c = len(self.answer), self.config
        width = min(self._horizon.end(done), c.max_new_tokens) - done  # tokens this forward may commit
        chains: list[Chain] = []
        for i, draft in enumerate(self._drafts):
            del draft[width - 1 :]
            missing = width - 1 - len(draft)
            if missing:
                draft += self._guesses.draw(done + len(draft), missing, stream=i).tolist()
            _add(chains, Chain(draft[: self._end_of(draft, main=i == 0)], DRAFT, draft=i))
        if c.chains > len(chains):
            for chain in self._candidates(width - 1):
                _add(chains, chain)
                if len(chains) == c.chains:
                    break
        return self._pace.cut(chains) if self._pace else chains

    def _end_of(self, draft: Sequence[int], *, main: bool) -> int:
        """Tokens of it to feed. What follows an EOS can never be committed with it; but a main draft's end must first be confirmed, since
        behind a wrong one its tokens go on being refreshed."""
        if self.config.plain:
            return len(draft)
        end = next((i for i, token in enumerate(draft) if token in self.rules.eos_ids), None)
        before = self._foreseen_end
        if main:
            self._foreseen_end = None if end is None else len(self.answer) + end
            if end is None or before is None or abs(before - self._foreseen_end) > SAME_END:
                return len(draft)
        return len(draft) if end is None else end

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

    def receive(self, chains: Sequence[Chain], predictions: Sequence[Sequence[int]], consensus: Sequence[int] | None = None) -> Verdict | None:
        """predictions[i]: what the model says after the last committed token and after each token of chains[i]; consensus: what it says
        there by all the drafts together, as long as the longest of them.

        Commits the longest verified chain and the prediction after it. None once the text has ended (stats.stop_reason).
        """
        lengths = [accepted_length(chain.tokens, p) for chain, p in zip(chains, predictions, strict=True)]
        if self._pace:
            self._pace.observe(chains, lengths)
        winner = max(range(len(chains)), key=lambda i: (lengths[i], -i))
        accepted, predicted = lengths[winner], predictions[winner]
        commit = predicted[: accepted + 1]
        ends = self._end_in(commit)
        if ends is not None:
            commit = commit[: ends + 1]
        done = len(self.answer)
        self.answer += commit
        self.stats.count(len(commit), chains[winner].source, fed=len(self.uncached) + sum(len(chain.tokens) for chain in chains))
        if ends is not None or len(self.answer) == self.config.max_new_tokens:
            self.stats.stop_reason = "length" if ends is None else "eos" if commit[-1] in self.rules.eos_ids else "criteria"
            return None
        self._look_ahead(chains[0].tokens, predictions[0], commit, done)
        self._refresh(chains, predictions, consensus or predictions[0], winner, len(commit))
        if self._ngrams is not None:
            self._ngrams.extend(commit)
        self._guesses.append(torch.tensor(commit))
        self.uncached = commit[-1:]
        return Verdict(winner, accepted)

    def _end_in(self, commit: Sequence[int]) -> int | None:
        eos = next((i for i, token in enumerate(commit) if token in self.rules.eos_ids), None)
        stop = self._stops(commit[:eos]) if self._stops is not None and eos != 0 else None
        return eos if stop is None else stop

    def _look_ahead(self, draft: Sequence[int], refreshed: Sequence[int], commit: Sequence[int], done: int) -> None:
        """Tell the horizon how much of the newest block is right, and the pool what was rejected."""
        committed = len(commit)
        start = self._horizon.newest - done  # index in the draft; below 0 where the newest block is partly committed
        newest = committed - start if committed > start else accepted_length(draft[start:], refreshed[start:]) if start >= 0 else 0
        self._horizon.observe(len(self.answer), newest)
        if self._pool is not None:
            self._pool.add(refreshed[committed - 1 :])

    def _refresh(self, chains: Sequence[Chain], predictions: Sequence[Sequence[int]], main: Sequence[int], winner: int, committed: int) -> None:
        """The drafts' next states, one token per answer index from the first uncommitted on; tokens that were not fed stay as they were."""
        refreshed = {chain.draft: p for chain, p in zip(chains, predictions, strict=True) if chain.draft is not None}
        refreshed[0] = main
        if chains[winner].draft is None:  # behind a candidate's end the refreshed draft goes on: tokens right at their place stay right
            refreshed[0] = [*predictions[winner], *main[len(predictions[winner]) :]]
        for i, draft in enumerate(self._drafts):
            new = refreshed.get(i, ())
            self._drafts[i] = [*new[committed:], *draft[max(committed, len(new)) :]]


def _add(chains: list[Chain], chain: Chain) -> None:
    """Unless another one begins with it."""
    tokens = list(chain.tokens)
    if all(tokens != list(other.tokens[: len(tokens)]) for other in chains):
        chains.append(chain)
