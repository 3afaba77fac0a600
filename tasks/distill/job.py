"""One distillation as its workers need it, and the files of its folder; free of torch and Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.distill.config import DistillConfig
from tasks.stage import Reporter


@dataclass(frozen=True)
class DistillJob:
    """Picklable. output: the stage's folder, on storage that driver and workers share."""

    config: DistillConfig
    packed: Path  # packed.parquet
    model: Path  # what training starts from, and the teacher of the probe
    prompts: Path | None  # folder the probe's prompts are in
    output: Path
    token_budget: int | None
    threads: int  # of torch in a worker
    trust_remote_code: bool
    report: Reporter

    @property
    def weights(self) -> Path:
        return self.output / "weights"  # the selected ones: the stage's product

    @property
    def training(self) -> Path:
        return self.output / "training.json"  # written last: training has ended

    @property
    def best(self) -> Path:
        return self.output / "best"  # weights by step, while training

    @property
    def storage(self) -> Path:
        return self.output / "ray"  # checkpoints, while training

    @property
    def stop(self) -> Path:
        return self.output / "stop"  # there: the workers are asked to save and return

    @property
    def refused(self) -> Path:
        return self.output / "refused.txt"  # the UserError that a worker raised
