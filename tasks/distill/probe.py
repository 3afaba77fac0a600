"""The watch over a training run: a fixed set of prompts, decoded now and then, compared with what the teacher says to them.

Knows nothing of steps, files of the run or other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tasks.artifacts import PromptRows
from tasks.distill.config import LoraSettings, ProbeSettings
from tasks.stage import UserError

if TYPE_CHECKING:
    from jacobi_core.decoding.stats import Generation

ENDED_AT_LEAST = 4  # of the teacher's answers, before their number says anything


@dataclass(frozen=True)
class ProbeResult:
    """metrics: see Probe. accepted_by_position[k-1]: share of forwards that accepted at least k draft tokens. verdict: None, or what is
    wrong with the model, in one sentence."""

    metrics: dict[str, float]
    accepted_by_position: list[float] = field(default_factory=list)
    verdict: str | None = None


def probe_prompts(prompts_folder: Path, count: int) -> list[list[int]]:
    """Token ids of the first `count` validation prompts, or, where there is no such split, of the first training prompts."""
    for split in ("validation", "train"):
        rows = PromptRows(prompts_folder, split)
        if len(rows):
            return [prompt.input_ids for prompt in rows.read(range(min(count, len(rows))))]
    raise UserError(f"{prompts_folder}: holds no prompts to probe with")


class Probe:
    """Measures weights on the probe prompts, by our decoder's plain Jacobi method, greedily. Deterministic; touches no global random state.

    Metrics: `tpf` (tokens per forward, pooled over the prompts); `accepted_K` for K = 1, 2, 4, ... below block_size (share of forwards that
    accepted at least K draft tokens); `equal_to_teacher` (share of answers equal to the teacher's token by token); `distinct_1`, `distinct_2`
    (different n-grams of all answers / their number; 0 where there is none); `eos_rate` (share of answers that end by themselves);
    `mean_tokens` (tokens of an answer). What is judged: `_verdict`.

    Memory, on the rank that has it (rank 0): one more copy of the weights in host memory, and on the GPU while it decodes.
    """

    def __init__(
        self,
        model_folder: Path,
        prompts: Sequence[Sequence[int]],
        settings: ProbeSettings,
        *,
        lora: LoraSettings,
        dtype: str,
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        """model_folder: the teacher, what training starts from. prompts: token ids; those that do not fit its context with max_new_tokens
        are left out. lora: of the weights that will be probed. dtype: to decode in. Raises UserError where no prompt fits."""
        from jacobi_core.decoding.cache import context_length
        from jacobi_core.decoding.config import DecodingConfig, Method
        from jacobi_core.decoding.tokens import TokenRules
        from jacobi_core.hub import default_device, load_model, load_tokenizer
        from tasks.distill.adapters import with_adapters

        with torch.random.fork_rng():
            model = load_model(model_folder, dtype=dtype, device=torch.device("cpu"), trust_remote_code=trust_remote_code)
        limit, longest = context_length(model), settings.max_new_tokens
        self._prompts = [list(p) for p in prompts if limit is None or len(p) + longest <= limit]
        if not self._prompts:
            raise UserError(f"distill.probe.max_new_tokens={longest}: with it no probe prompt fits the model's context of {limit} tokens")
        self._settings, self._device = settings, default_device()
        self._decoding = DecodingConfig(method=Method.jacobi, block_size=settings.block_size, max_new_tokens=longest, seed=seed)
        self._rules = TokenRules.of(model, load_tokenizer(model_folder, trust_remote_code=trust_remote_code))
        self._model = model
        self._teachers_answers, metrics, accepted = self._decode()
        self.teacher = ProbeResult({**metrics, "equal_to_teacher": 1.0}, accepted)  # the weights that training starts from
        if lora.rank:
            self._model = with_adapters(model, lora, seed).eval()

    def __call__(self, state: Mapping[str, torch.Tensor]) -> ProbeResult:
        """state: weights as `weights.gathered` returns them."""
        from tasks.distill.weights import load_into

        load_into(self._model, state)
        answers, metrics, accepted = self._decode()
        equal = sum(mine == theirs for mine, theirs in zip(answers, self._teachers_answers, strict=True))
        metrics["equal_to_teacher"] = equal / len(answers)
        return ProbeResult(metrics, accepted, _verdict(metrics, self.teacher.metrics, len(answers), self._settings.collapse_share))

    def _decode(self) -> tuple[list[list[int]], dict[str, float], list[float]]:
        """The answers, their metrics but for the comparison, and acceptance by position."""
        from jacobi_core.decoding.generate import generate_batch

        self._model.to(self._device)
        generations = generate_batch(self._model, self._prompts, self._decoding, rules=self._rules)
        self._model.to("cpu")
        return [generation.new_tokens.tolist() for generation in generations], *_figures(generations, self._settings.block_size)


def _figures(generations: Sequence[Generation], block_size: int) -> tuple[dict[str, float], list[float]]:
    from jacobi_core.decoding.stats import DecodingStats

    answers = [generation.new_tokens.tolist() for generation in generations]
    pooled = DecodingStats(committed_per_forward=[n for generation in generations for n in generation.stats.committed_per_forward])
    accepted = pooled.accepted_by_position()
    places = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < block_size]
    metrics = {
        "tpf": pooled.tpf,
        **{f"accepted_{k}": accepted[k - 1] if k <= len(accepted) else 0.0 for k in places},
        "distinct_1": _distinct([(token,) for answer in answers for token in answer]),
        "distinct_2": _distinct([pair for answer in answers for pair in pairwise(answer)]),
        "eos_rate": sum(generation.stats.stop_reason == "eos" for generation in generations) / len(generations),
        "mean_tokens": pooled.tokens / len(generations),
    }
    return metrics, accepted


def _distinct(ngrams: Sequence[tuple[int, ...]]) -> float:
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _verdict(metrics: Mapping[str, float], teacher: Mapping[str, float], answers: int, share: float) -> str | None:
    """Collapse: far fewer different bigrams than the teacher (a loop, one text for all, or nothing but EOS), far shorter answers (which end early,
    however varied), or far fewer answers that end.

    Where the teacher itself ended fewer than ENDED_AT_LEAST of its answers within max_new_tokens, their number is chance and is not judged.
    """
    judged = ["distinct_2", "mean_tokens"] + (["eos_rate"] if round(teacher["eos_rate"] * answers) >= ENDED_AT_LEAST else [])
    fallen = [f"{name} {metrics[name]:.3f}, teacher {teacher[name]:.3f}" for name in judged if metrics[name] < share * teacher[name]]
    if not fallen:
        return None
    return f"the model collapses: {' and '.join(fallen)}, on {answers} probe prompts (bound: distill.probe.collapse_share={share} of the teacher's)"
