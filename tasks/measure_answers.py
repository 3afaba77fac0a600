"""Stage `answer_lengths`: how long the model's own greedy answers to a few training prompts are. What a run is fitted to rests on it.

Writes answer_lengths.json. The answers themselves are not kept: trajectories are generated for all prompts anyway.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks import artifacts
from tasks.artifacts import PromptRows
from tasks.stage import StageContext, UserError, check_dtype

SCHEMA_VERSION = 1
FILE = "answer_lengths.json"

log = logging.getLogger(__name__)


@dataclass
class MeasureAnswersConfig:
    """Raises ValueError naming the field for a value that cannot be used."""

    prompts: int = 16  # of the training split
    max_new_tokens: int = 1024  # longer answers are cut, and counted as that long; less where the model holds less
    batch_size: int = 16  # answers decoded together
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_dtype("dtype", self.dtype)


def run(config: MeasureAnswersConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model. Raises UserError where the model has no room for an answer."""
    from jacobi_core.decoding.cache import context_length
    from jacobi_core.decoding.greedy_batch import greedy_batch
    from tasks.evaluate.answers import load

    rows = PromptRows(inputs["prompts"], "train")
    prompts = [p.input_ids for p in rows.read(range(min(config.prompts, len(rows.ids))))]
    model, _, rules = load(inputs["model"], config.dtype, trust_remote_code=context.trust_remote_code)
    longest, limit = max(map(len, prompts)), context_length(model)
    cap = config.max_new_tokens if limit is None else min(config.max_new_tokens, limit - longest)
    if cap < 1:
        raise UserError(f"data.max_prompt_tokens: a prompt of {longest} tokens leaves no room for an answer, the model holds {limit}; lower it")
    began = time.monotonic()
    answers = greedy_batch(model, prompts, max_new_tokens=cap, rules=rules, slots=config.batch_size)
    seconds = time.monotonic() - began
    lengths = [len(answer.tokens) for answer in answers]
    found = {
        "schema_version": SCHEMA_VERSION,
        "max_new_tokens": cap,
        "context": limit,
        "prompt_tokens": [len(p) for p in prompts],
        "answer_tokens": lengths,
        "ended": [answer.stop_reason == "eos" for answer in answers],
        "seconds": seconds,
    }
    artifacts.write_json(output / FILE, found)
    log.info("answer_lengths: %d answers of %d to %d tokens, %.0f tokens/s", len(lengths), min(lengths), max(lengths), sum(lengths) / seconds)
    return {
        "answer_tokens_median": statistics.median(lengths),
        "answer_tokens_mean": statistics.fmean(lengths),
        "answer_tokens_max": max(lengths),
        "eos_share": sum(found["ended"]) / len(lengths),
        "answers": len(lengths),
    }
