"""Decoding of one prompt or a batch, every method in one loop. Lossless: the tokens are those of AR decoding, greedy or with the same noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from jacobi_core.decoding.batch import BatchForward
from jacobi_core.decoding.cache import context_length
from jacobi_core.decoding.choose import Chooser, warpers
from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.forwards import Forward, forward_for, pace_of
from jacobi_core.decoding.pace import Pace
from jacobi_core.decoding.stats import Generation
from jacobi_core.decoding.text import Chain, Text, Verdict
from jacobi_core.decoding.tokens import TokenRules

NOT_FINITE = "not finite"  # stop_reason of a guarded text whose logits broke


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: DecodingConfig,
    *,
    rules: TokenRules | None = None,
    prompt_id: int = 0,
    processors: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: BaseStreamer | None = None,
    forward: Forward | None = None,
) -> Generation:
    """Decode after input_ids, long [1, L] or [L] with L >= 1 (paper section 2.1, algorithm sections 1 and 6).

    rules: EOS and draftable ids; by default read off the model alone (pass TokenRules.of(model, tokenizer) for a padded vocabulary).
    prompt_id: keys the random first guess and the sampling noise, with config.seed.
    processors: logits processors, run before config's own warpers. Settings of the model's generation config do not apply.
    stopping_criteria: asked for every committed token, also inside a block.
    streamer: gets the prompt, then what every forward commits, never a token past a stop.
    forward: by default `forward_for`'s choice; on CUDA pass one StaticForward to many calls, and its graphs are captured once.
    Raises ValueError for an empty prompt, a batch, a text longer than the model's context, or a processor that keeps state.
    """
    more = {"prompt_id": prompt_id, "processors": processors, "stopping_criteria": stopping_criteria, "streamer": streamer}
    row = Row.make(model, one_prompt(input_ids), config, rules, **more)
    return decode_rows(forward or forward_for(model, config, row.capacity), [row])[0]


def generate_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    *,
    rules: TokenRules | None = None,
    prompt_ids: Sequence[int] | None = None,
    processors: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
) -> list[Generation]:
    """Decode many prompts (token ids, any lengths) in one batch; rows accept different numbers of tokens and leave when they end.

    Each row's tokens and, without config.auto, its statistics are those of its run alone (fp64). prompt_ids: by default 0, 1, ... Else as `generate`.
    """
    rules = rules or TokenRules.of(model)
    keys = prompt_ids if prompt_ids is not None else range(len(prompts))
    more = {"processors": processors, "stopping_criteria": stopping_criteria}
    pace = pace_of(model, config, rows=len(prompts))
    rows = [Row.make(model, torch.as_tensor(p), config, rules, prompt_id=key, pace=pace, **more) for p, key in zip(prompts, keys, strict=True)]
    return decode_rows(BatchForward(model, len(rows)), rows)


@dataclass
class Row:
    """One text, how its tokens are chosen, and who listens."""

    text: Text
    choose: Chooser
    streamer: BaseStreamer | None
    padding: list[int]
    guarded: bool

    @classmethod
    def make(
        cls,
        model: PreTrainedModel,
        prompt: torch.Tensor,
        config: DecodingConfig,
        rules: TokenRules | None,
        prompt_id: int = 0,
        processors: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        streamer: BaseStreamer | None = None,
        padding: Sequence[int] = (),
        pace: Pace | None = None,
        stops: Callable[[Sequence[int]], int | None] | None = None,
        guarded: bool = False,
    ) -> Row:
        """prompt: long [L]. padding: what processors and criteria see before it and the model does not, as in a padded batch of transformers'.

        stops: as for `Text`, in the place of criteria. guarded: end the text, as "not finite", rather than choose from broken logits.
        """
        before = list(padding)
        if len(prompt) == 0:
            raise ValueError("a prompt needs at least one token")
        check_context(model, len(prompt), config.max_new_tokens)
        if stopping_criteria:
            stops = _Stops(stopping_criteria, [*before, *prompt.tolist()], more=config.max_new_tokens, device=model.device)
        text = Text(prompt, config, rules or TokenRules.of(model), prompt_id=prompt_id, stops=stops, pace=pace or pace_of(model, config))
        chosen_by = LogitsProcessorList([*(processors or ()), *warpers(config)])
        if streamer is not None:
            streamer.put(prompt.cpu())
        return cls(text, Chooser(chosen_by, sample=config.temperature > 0, seed=config.seed, prompt_id=prompt_id), streamer, before, guarded)

    def advance(self, chains: Sequence[Chain], logits: torch.Tensor) -> Verdict | None:
        """Choose, verify, commit, stream. None once the text has ended."""
        if self.guarded and not bool(logits.amax(-1).isfinite().all()):
            self.text.stats.stop_reason = NOT_FINITE
            return None
        positions, prefixes = self.text.places(chains, with_prefixes=self.choose.needs_prefix)
        if self.padding and prefixes is not None:
            prefixes = [[*self.padding, *prefix] for prefix in prefixes]
        scores = self.choose(logits, positions, prefixes)
        agreed = agreed_scores(scores, chains)
        best = scores.argmax(-1)
        chosen = (best if agreed is None else torch.cat([best, agreed.argmax(-1)])).tolist()  # one wait for the device
        done, places = len(self.text.answer), len(positions)
        verdict = self.text.receive(chains, self.text.read(chains, chosen[:places]), chosen[places:])
        self.choose.forget_before(len(self.text.answer))
        if self.streamer is not None:
            self.streamer.put(torch.tensor(self.text.answer[done:]))
            if verdict is None:
                self.streamer.end()
        return verdict

    @property
    def capacity(self) -> int:
        """Most tokens, the prompt included."""
        return len(self.text.prompt) + self.text.config.max_new_tokens

    @property
    def generation(self) -> Generation:
        """What has been committed so far."""
        return Generation(torch.tensor(self.text.answer, dtype=torch.long), self.text.stats)


class _Stops:
    """Asks the caller's criteria about every token of a commit, each with all that is before it. Once per forward the commit is all that is
    moved to the device, whatever the length of the text."""

    def __init__(self, criteria: StoppingCriteriaList, text: Sequence[int], *, more: int, device: torch.device) -> None:
        """more: most tokens that may follow `text` (padding and prompt)."""
        self._criteria, self._length = criteria, len(text)
        self._ids = torch.zeros(1, len(text) + more, dtype=torch.long, device=device)
        self._ids[0, : len(text)] = torch.tensor(text)

    def __call__(self, commit: Sequence[int]) -> int | None:
        start = self._length
        self._length += len(commit)
        self._ids[0, start : self._length] = torch.tensor(commit)
        return next((i for i in range(len(commit)) if self._criteria(self._ids[:, : start + i + 1], None).any()), None)


def step(forward: Forward, rows: Sequence[Row]) -> list[Verdict | None]:
    """One forward for all texts, whatever their methods; what became of each, None where it has ended and `forward` has forgotten it."""
    with torch.inference_mode():
        # 1. what may follow each committed text: the refreshed draft, and candidates beside it
        proposals = [row.text.propose() for row in rows]
        # 2. one forward over all of them, against one cache
        logits = forward.logits_of([(row.text.uncached, [c.tokens for c in chains]) for row, chains in zip(rows, proposals, strict=True)])
        # 3. verify, stop at EOS, the caller's word or the cap, commit
        verdicts = [row.advance(chains, found) for row, chains, found in zip(rows, proposals, logits, strict=True)]
        # 4. forget everything but the accepted branches
        forward.keep([verdict and (verdict.winner, verdict.accepted) for verdict in verdicts])
    return verdicts


def run_forwards(forward: Forward, rows: Sequence[Row]) -> Iterator[None]:
    """The loop of texts that begin together; pauses after every forward. What the caller does then runs outside inference mode."""
    running = list(rows)
    while running:
        verdicts = step(forward, running)
        running = [row for row, verdict in zip(running, verdicts, strict=True) if verdict is not None]
        yield


def decode_rows(forward: Forward, rows: Sequence[Row]) -> list[Generation]:
    """All forwards at once."""
    for _ in run_forwards(forward, rows):
        pass
    return [row.generation for row in rows]


def agreed_scores(scores: torch.Tensor, chains: Sequence[Chain]) -> torch.Tensor | None:
    """What all drafts together say, [1 + tokens of the longest draft, V] up to a factor: the sum of the scores at each answer index, which
    for logits is the drafts' geometric mean. None where there is no second draft. scores [k, V]: see `Text.places`."""
    drafts = [chain for chain in chains if chain.draft is not None]
    if len(drafts) < 2:
        return None
    steps = [0, *(i + 1 for chain in drafts for i in range(len(chain.tokens)))]  # drafts come before candidates
    agreed = scores.new_zeros(1 + max(len(chain.tokens) for chain in drafts), scores.shape[-1])
    return agreed.index_add_(0, torch.tensor(steps, device=scores.device), scores[: len(steps)])


def one_prompt(input_ids: torch.Tensor) -> torch.Tensor:
    """[L] of [1, L] or [L]. Raises ValueError for a batch."""
    prompt = input_ids.reshape(-1) if input_ids.dim() == 2 and input_ids.shape[0] == 1 else input_ids
    if prompt.dim() != 1:
        raise ValueError(f"input_ids must hold one prompt, got shape {tuple(input_ids.shape)}; generate_batch takes many")
    return prompt


def check_context(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises ValueError where prompt and answer do not fit the model's context length."""
    limit = context_length(model)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise ValueError(f"prompt ({prompt_tokens} tokens) + max_new_tokens ({max_new_tokens}) exceed the model's context of {limit} tokens")
