"""Stage `*/evaluate`: accuracy by executing tests, and speed of greedy AR against parallel decoding, side by side in one process.

Speed: batch size 1, methods interleaved prompt by prompt after a warm-up, totals over all prompts; every parallel output is
compared with greedy AR of the same model. Accuracy: the greedy answers of all accuracy prompts, batched; parallel decoding
returns the same tokens (that is what `equals_ar` verifies), so its rows carry the same accuracy.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_core.decoding.config import DecodingConfig, Method
from tasks import artifacts
from tasks.artifacts import Prompt
from tasks.export_model import provenance
from tasks.problem_sets.problem import Problem
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.stage import StageContext, UserError, check_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from jacobi_core.decoding.stats import Generation
    from jacobi_core.decoding.tokens import TokenRules

log = logging.getLogger(__name__)
WARM_UP = 2  # prompts decoded before the clock counts
SAMPLES = 8  # texts kept for people to read


@dataclass
class EvaluateConfig:
    """Raises ValueError naming the field for a value that cannot be used."""

    split: str = "test"
    accuracy_prompts: int = 200
    speed_prompts: int = 32  # the first of the accuracy prompts
    methods: list[Method] = field(default_factory=lambda: [Method.jacobi])  # against greedy AR
    block_sizes: list[int] = field(default_factory=lambda: [16, 32, 64])
    max_new_tokens: int = 256
    batch_size: int = 64  # of the accuracy answers
    seed: int = 0  # of the random first guesses
    dtype: str = "float32"
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def __post_init__(self) -> None:
        self.methods = [Method(m) for m in self.methods]
        for name in ("accuracy_prompts", "speed_prompts", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_dtype("dtype", self.dtype)
        self.settings()  # every block size must be usable

    def settings(self) -> list[DecodingConfig]:
        """Greedy AR first, then every method at every block size."""
        shared = {"max_new_tokens": self.max_new_tokens, "seed": self.seed}
        parallel = [DecodingConfig(method=m, block_size=n, **shared) for m in self.methods for n in self.block_sizes]
        return [DecodingConfig(method=Method.ar, block_size=1, **shared), *parallel]


def run(config: EvaluateConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model. Writes evaluation.json (see docs/schemas.md) and answers.json."""
    from jacobi_core.decoding.tokens import TokenRules
    from jacobi_core.hub import load_model, load_tokenizer

    prompts = artifacts.read_prompts(inputs["prompts"], config.split)[: config.accuracy_prompts]
    if not prompts:
        raise UserError(f"evaluate.split={config.split}: the prompts hold no such prompt")
    tokenizer = load_tokenizer(inputs["model"], trust_remote_code=context.trust_remote_code)
    model = load_model(inputs["model"], dtype=config.dtype, trust_remote_code=context.trust_remote_code)
    rules, origin = TokenRules.of(model, tokenizer), provenance(inputs["model"])

    accuracy, answers = _accuracy(config, model, tokenizer, rules, prompts)
    artifacts.write_json(output / "answers.json", answers)
    timed = prompts[: config.speed_prompts]
    runs = _speed(config, model, rules, timed)
    base = runs[0]
    rows, differences = [], []
    for run_ in runs:
        found = _differences(model, timed, base, run_)
        differences += [{"model": origin["name"], **d} for d in found]
        rows.append(
            {
                "model": origin["name"],
                "benchmark": prompts[0].meta["problem_set"],
                **run_.row(),
                "speedup": run_.tps / base.tps,
                "dtype": config.dtype,
                "accuracy": accuracy,
                "accuracy_prompts": len(prompts) if accuracy is not None else 0,
                "train_tokens": origin["train_tokens"],
                "equals_ar": 1 - len(found) / len(timed),
            }
        )
    best = max(rows[1:], key=lambda r: r["tps"], default=rows[0])
    artifacts.write_json(
        output / "evaluation.json",
        {
            "model": origin["name"],
            "benchmark": rows[0]["benchmark"],
            "model_path": str(inputs["model"]),
            "rows": rows,
            "differences": differences,
            "samples": _samples(tokenizer, timed, base, runs[-1], answers),
            "accepted_lengths": {f"{r.config.method.value}@{r.config.block_size}": r.accepted_lengths() for r in runs},
        },
    )
    metrics = {"ar_tps": base.tps, "best_tpf": best["tpf"], "best_speedup": best["speedup"], "equals_ar": min(r["equals_ar"] for r in rows)}
    return {"accuracy": accuracy, **metrics} if accuracy is not None else metrics


def _accuracy(
    config: EvaluateConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rules: TokenRules, prompts: list[Prompt]
) -> tuple[float | None, list[dict[str, Any]]]:
    """Share of prompts whose greedy answer passes its tests (None where they have none), and every answer."""
    from jacobi_core.decoding.greedy_batch import greedy_batch
    from tasks.problem_sets.scoring import score

    answers: list[dict[str, Any]] = []
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        found = greedy_batch(model, [p.input_ids for p in batch], max_new_tokens=config.max_new_tokens, rules=rules)
        answers += [
            {"id": p.id, "text": tokenizer.decode(a.tokens, skip_special_tokens=True), "tokens": len(a.tokens), "stop_reason": a.stop_reason}
            for p, a in zip(batch, found, strict=True)
        ]
        log.info("evaluate: %d/%d greedy answers", len(answers), len(prompts))
    if not all(p.meta.get("tests") for p in prompts):
        return None, answers
    fields = Problem.__dataclass_fields__
    problems = [Problem(**{k: v for k, v in p.meta.items() if k in fields}) for p in prompts]
    verdicts = score(problems, [a["text"] for a in answers], config.sandbox)
    for answer, verdict in zip(answers, verdicts, strict=True):
        answer |= {"passed": verdict.passed, "reason": verdict.reason}
    return sum(v.passed for v in verdicts) / len(verdicts), answers


@dataclass
class _SpeedRun:
    """One decoding setting over all speed prompts."""

    config: DecodingConfig
    generations: list[Generation] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(g.stats.tokens for g in self.generations)

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds

    def accepted_lengths(self) -> dict[int, int]:
        counts: Counter[int] = Counter()
        for generation in self.generations:
            counts.update(generation.stats.histogram())
        return dict(sorted(counts.items()))

    def row(self) -> dict[str, Any]:
        forwards = sum(g.stats.forwards for g in self.generations)
        return {
            "method": self.config.method.value,
            "block_size": self.config.block_size,
            "batch_size": 1,
            "prompts": len(self.generations),
            "tokens": self.tokens,
            "forwards": forwards,
            "seconds": self.seconds,
            "tpf": self.tokens / forwards,
            "tps": self.tps,
            "stop_reasons": dict(Counter(g.stats.stop_reason for g in self.generations)),
        }


def _speed(config: EvaluateConfig, model: PreTrainedModel, rules: TokenRules, prompts: list[Prompt]) -> list[_SpeedRun]:
    import torch

    from jacobi_core.decoding.generate import generate

    runs = [_SpeedRun(setting) for setting in config.settings()]
    told = time.monotonic()
    for index, prompt in enumerate([*prompts[:WARM_UP], *prompts]):
        ids = torch.tensor(prompt.input_ids)
        for run_ in runs[index % len(runs) :] + runs[: index % len(runs)]:  # nobody always goes first
            start = time.perf_counter()
            generation = generate(model, ids, run_.config, rules=rules, prompt_id=prompt.id)  # ends with tokens on the host
            seconds = time.perf_counter() - start
            if index >= min(WARM_UP, len(prompts)):
                run_.seconds += seconds
                run_.generations.append(generation)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            log.info("evaluate: speed %d/%d prompts", max(0, index + 1 - WARM_UP), len(prompts))
    return runs


def _differences(model: PreTrainedModel, prompts: list[Prompt], base: _SpeedRun, run_: _SpeedRun) -> list[dict[str, Any]]:
    import torch

    from jacobi_core.decoding.equivalence import compare_with_ar

    found = []
    for prompt, ar, generation in zip(prompts, base.generations, run_.generations, strict=True):
        difference = compare_with_ar(model, torch.tensor(prompt.input_ids), ar.new_tokens, generation.new_tokens)
        if difference is not None:
            where = {
                "problem_id": prompt.meta.get("problem_id", str(prompt.id)),
                "method": run_.config.method.value,
                "block_size": run_.config.block_size,
            }
            found.append({**where, "first_index": difference.first_index, "margin": difference.margin, "kind": difference.kind})
    return found


def _samples(
    tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], ar: _SpeedRun, parallel: _SpeedRun, answers: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    def text(tokens: torch.Tensor) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    return [
        {
            "problem_id": prompt.meta.get("problem_id", str(prompt.id)),
            "prompt": prompt.messages[-1]["content"],
            "ar": text(ar.generations[i].new_tokens),
            "jacobi": text(parallel.generations[i].new_tokens),
            "passed": answers[i].get("passed"),
        }
        for i, prompt in enumerate(prompts[:SAMPLES])
    ]
