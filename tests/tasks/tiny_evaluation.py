"""Small settings of evaluation, and its three stages in one folder."""

from __future__ import annotations

import pytest

from jacobi_core.decoding import generate as generate_module
from tasks import artifacts
from tasks.evaluate import EvaluateConfig
from tasks.evaluate.stage import decode_answers, score, time_decoders
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.stage import StageContext

SPEED = 3  # timed prompts
SAME = ("tokens", "forwards", "stop_reasons", "equals_ar")  # of a row, when run again


def settings(**changes) -> EvaluateConfig:
    base = {"accuracy_prompts": 5, "speed_prompts": SPEED, "block_sizes": [4, 8], "max_new_tokens": 20, "batch_size": 2, "dtype": "float64"}
    alone = {"methods": ["jacobi"], "batch_sizes": [1], "references": []}
    return EvaluateConfig(**{**base, **alone, "sandbox": SandboxConfig(allow_code_execution=True), **changes})


def evaluate(config, inputs, output):
    """The three stages in one folder; (metrics, evaluation.json, answers.json)."""
    output.mkdir(exist_ok=True)
    decode_answers(config, inputs, output, StageContext())
    time_decoders(config, inputs, output, StageContext())
    metrics = score(config, {**inputs, "answers": output, "speed": output}, output, StageContext())
    return metrics, artifacts.read_json(output / "evaluation.json"), artifacts.read_json(output / "answers.json")


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Every decoding of the speed part from now on, in order: (prompt id, method, block size)."""
    made, original = [], generate_module.generate

    def generate(model, ids, config, **kwargs):
        made.append((kwargs["prompt_id"], config.method, config.block_size))
        return original(model, ids, config, **kwargs)

    monkeypatch.setattr(generate_module, "generate", generate)
    return made
