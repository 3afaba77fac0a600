"""A driver process of the distillation stage, for tests that kill it or its workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.distill.config import DistillConfig, ProbeSettings
from tasks.distill.stage import run
from tasks.stage import ClusterConfig, StageContext, UserError
from tests.tasks.tiny_training import changed

STEPS = 24


@dataclass
class Pace:
    """A reporter that writes down the step, takes its time, and kills its own process, rank 0's, at one step, once."""

    folder: Path
    kill_at: int | None

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        with (self.folder / "steps.txt").open("a") as file:
            file.write(f"{step}\n")
        time.sleep(0.4)
        if step == self.kill_at and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def settings() -> DistillConfig:
    """24 steps of the tiny training; checkpoints at every fourth."""
    return changed(epochs=100, max_steps=STEPS, checkpoint_every=4, learning_rate=1e-3, probe=ProbeSettings(every=0))


def main() -> int:
    """Arguments: folder (with packed/ and base/), number of workers, step at which rank 0 is killed (0: none)."""
    from pipelines.process import sigterm_raises

    folder, workers, kill_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    output = folder / "out"
    output.mkdir(exist_ok=True)
    context = StageContext(report=Pace(folder, kill_at or None), cluster=ClusterConfig(workers=workers, num_cpus=4))
    with sigterm_raises():
        try:
            run(settings(), {"packed": folder / "packed", "model": folder / "base"}, output, context)
        except UserError as error:
            print(f"refused: {error}", flush=True)
            return 2
    return 0
