"""What is timed: our decoder under one setting, transformers' own generate(), and its prompt lookup, all behind one call.

A call decodes prompts together and keeps its own time: from token ids on the host to token ids on the host, tokenization left out. No
device is made to wait but once, where the first forward of transformers' loop ends. Knows nothing about files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.forwards import forward_for
from jacobi_core.decoding.static_forward import StaticForward, widths_for
from jacobi_core.decoding.stats import Generation
from jacobi_core.decoding.tokens import TokenRules
from tasks.artifacts import Prompt
from tasks.evaluate.config import Reference, method_name


@dataclass
class Answer:
    """tokens: EOS included. accepted_lengths: tokens committed by each forward until this answer ended."""

    tokens: list[int]
    stop_reason: str
    accepted_lengths: list[int]

    @classmethod
    def of(cls, generation: Generation) -> Answer:
        return cls(generation.new_tokens.tolist(), generation.stats.stop_reason, generation.stats.committed_per_forward)


@dataclass
class Timed:
    """One batch. prefill_seconds: until the first forward's tokens were on the host."""

    answers: list[Answer]
    seconds: float
    prefill_seconds: float


class Decoder(Protocol):
    """method, block_size and batch_size are those of its rows. learns: its first text costs more than the others."""

    method: str
    block_size: int
    batch_size: int
    learns: bool

    def __call__(self, prompts: Sequence[Prompt]) -> Timed: ...


class OurDecoder:
    """`generate` for one prompt, `generate_batch` for several."""

    def __init__(
        self, model: PreTrainedModel, rules: TokenRules, config: DecodingConfig, *, batch_size: int = 1, forwards: StaticForwards | None = None
    ) -> None:
        """forwards: keep one forward for all prompts where the device has one that can be kept; only for batch_size=1."""
        self.method, self.block_size, self.batch_size, self.config = method_name(config), config.block_size, batch_size, config
        self._model, self._rules = model, rules
        self._forward = forwards.of(config) if forwards is not None and batch_size == 1 else None
        self.learns = self._forward is not None or config.auto  # it captures graphs, or measures the machine

    def __call__(self, prompts: Sequence[Prompt]) -> Timed:
        return self._one(prompts[0]) if self.batch_size == 1 else self._many(prompts)

    def _one(self, prompt: Prompt) -> Timed:
        from jacobi_core.decoding.generate import generate

        ids, clock = torch.tensor(prompt.input_ids), _Commits()
        start = time.perf_counter()
        found = generate(
            self._model, ids, self.config, rules=self._rules, prompt_id=prompt.id, forward=self._forward, streamer=clock
        )  # ends with tokens on the host
        seconds = time.perf_counter() - start
        return Timed([Answer.of(found)], seconds, clock.first - start)

    def _many(self, prompts: Sequence[Prompt]) -> Timed:
        from jacobi_core.decoding.generate import generate_batch

        ids, keys = [p.input_ids for p in prompts], [p.id for p in prompts]
        with _Forwards(self._model, wait=False) as forwards:  # our loop reads every forward's tokens before it starts the next
            start = time.perf_counter()
            found = generate_batch(self._model, ids, self.config, rules=self._rules, prompt_ids=keys)
            seconds = time.perf_counter() - start
        return Timed([Answer.of(g) for g in found], seconds, forwards.prefill(start, seconds))


class StaticForwards:
    """Forwards whose captured graphs serve every prompt, and every setting of the same widths: captured once, not prompt by prompt.

    jacobi_core's borrowed_forward does that for callers nobody knows: it asks at every text whether the model has changed, and keeps the latest
    few. Here all prompts and settings are known and the model is ours, so none is captured twice, and nothing is asked while it is timed.
    """

    def __init__(self, model: PreTrainedModel, *, capacity: int) -> None:
        """capacity: most tokens that a prompt and its answer reach."""
        self._model, self._capacity = model, capacity
        self._made: dict[tuple[int, ...], StaticForward] = {}

    def of(self, config: DecodingConfig) -> StaticForward | None:
        """None where texts are decoded by a forward that holds one text only."""
        widths = widths_for(config)
        if widths not in self._made:
            forward = forward_for(self._model, config, self._capacity)
            if not isinstance(forward, StaticForward):
                return None
            self._made[widths] = forward
        return self._made[widths]


class TransformersDecoder:
    """transformers' greedy generate() on left-padded prompts, or its prompt lookup. Give it a model under `neutral` settings."""

    def __init__(
        self, model: PreTrainedModel, rules: TokenRules, reference: Reference, *, batch_size: int = 1, max_new_tokens: int, lookup: int
    ) -> None:
        """lookup: tokens that prompt lookup drafts per forward."""
        self.learns = False
        self._lookup = reference is Reference.prompt_lookup
        assert not self._lookup or batch_size == 1, "transformers' prompt lookup takes one prompt at a time"
        self.method, self.block_size, self.batch_size = reference.value, lookup + 1 if self._lookup else 1, batch_size
        self._model, self._eos, self._most = model, rules.eos_ids, max_new_tokens
        self._settings = {"max_new_tokens": max_new_tokens, **({"prompt_lookup_num_tokens": lookup} if self._lookup else {})}

    def __call__(self, prompts: Sequence[Prompt]) -> Timed:
        longest = max(len(p.input_ids) for p in prompts)
        ids = torch.tensor([[0] * (longest - len(p.input_ids)) + list(p.input_ids) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p.input_ids)) + [1] * len(p.input_ids) for p in prompts])
        commits = _Commits() if self._lookup else None  # its loop reads tokens forward by forward; the plain one need not, so none is asked for
        generate = type(self._model).generate  # an export's own is our decoder
        with _Forwards(self._model, wait=commits is None) as forwards:
            start = time.perf_counter()
            device = self._model.device
            found = generate(self._model, ids.to(device), attention_mask=mask.to(device), streamer=commits, **self._settings)
            rows = found[:, longest:].tolist()
            seconds = time.perf_counter() - start
        answers = [self._answer(row, commits) for row in rows]
        return Timed(answers, seconds, commits.first - start if commits else forwards.prefill(start, seconds))

    def _answer(self, row: list[int], commits: _Commits | None) -> Answer:
        end = next((i + 1 for i, token in enumerate(row) if token in self._eos), None)
        tokens = row[:end]
        lengths = commits.lengths(len(tokens)) if commits else [1] * len(tokens)
        return Answer(tokens, "length" if end is None else "eos", lengths)


def neutral(model: PreTrainedModel, rules: TokenRules) -> None:
    """Take every setting off the model's generation config that would make transformers' greedy decoding another task: penalties, minimum
    lengths, forced tokens and the like, which it would go on applying."""
    eos = sorted(rules.eos_ids)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0)


class _Commits(BaseStreamer):
    """When the first tokens came, and how many came each time. The first `put` is the prompt."""

    def __init__(self) -> None:
        self.first = 0.0
        self._counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if len(self._counts) == 1:
            self.first = time.perf_counter()
        self._counts.append(value.numel())

    def end(self) -> None: ...

    def lengths(self, tokens: int) -> list[int]:
        """Per forward, of an answer of so many tokens: what came behind its end is not counted."""
        found, left = [], tokens
        for count in self._counts[1:]:
            found.append(min(count, left))
            left -= found[-1]
            if not left:
                break
        return found


class _Forwards(AbstractContextManager["_Forwards"]):
    """When the model's second forward began: by then the first one's tokens were known."""

    def __init__(self, model: PreTrainedModel, *, wait: bool) -> None:
        """wait: let the device catch up at that moment, where the loop runs ahead of it."""
        self._model, self._wait, self._calls, self._second = model, wait and model.device.type == "cuda", 0, None

    def __enter__(self) -> _Forwards:
        self._hook = self._model.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _count(self, *_: object) -> None:
        self._calls += 1
        if self._calls == 2:
            if self._wait:
                torch.cuda.synchronize(self._model.device)
            self._second = time.perf_counter()

    def prefill(self, start: float, seconds: float) -> float:
        """Seconds; all of them where there was one forward."""
        return seconds if self._second is None else self._second - start
