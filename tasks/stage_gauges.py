"""How far the long stages are, as gauges in Ray's own metrics (there with `ray_` in front), beside those of the server (`serving.metrics`).

Ray exports them where its dashboard runs (extra `cluster`); elsewhere they cost nothing and say nothing. A stage that is over leaves with its
process.
"""

from __future__ import annotations

import sys
from typing import Any

GAUGES = {
    "jacobi_stage_progress": "Share of a stage's work that is done, 0 to 1.",
    "jacobi_train_tokens_per_second": "Packed tokens per second of training, all ranks together.",
    "jacobi_trajectory_tokens_per_second": "Answer tokens per second of trajectory generation, all workers together.",
    "jacobi_trajectory_quarantined": "Prompts that gave no trajectory because decoding them failed.",
}


class StageGauges:
    """The gauges of one stage, told apart by its kind: `trajectories` or `distill`."""

    def __init__(self, stage: str) -> None:
        ray = sys.modules.get("ray")
        self._tags, self._gauges = {"stage": stage}, _ray_gauges() if ray and ray.is_initialized() else {}

    def set(self, **values: float) -> None:
        """By the names of GAUGES, without `jacobi_`."""
        for name, value in values.items():
            assert f"jacobi_{name}" in GAUGES, name
            if self._gauges:
                self._gauges[f"jacobi_{name}"].set(value, tags=self._tags)


def _ray_gauges() -> dict[str, Any]:
    from ray.util.metrics import Gauge

    return {name: Gauge(name, text, tag_keys=("stage",)) for name, text in GAUGES.items()}
