"""Probing inside a training run: all ranks gather the weights, rank 0 measures and keeps the best, all learn the verdict."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tasks.distill.loop import Trainer
from tasks.distill.probe import ProbeResult
from tasks.distill.ranks import on_rank_zero
from tasks.distill.weights import gathered
from tasks.stage import Reporter, silent_reporter

EARLIER = 2  # best weights that stay beside the newest ones


class Watch:
    """Trainer.run's `probe`. Enters what it finds into trainer.probing, equally on every rank."""

    def __init__(
        self,
        probe: Callable[[Mapping[str, torch.Tensor]], ProbeResult] | None,
        *,
        write: Callable[[Path, Mapping[str, torch.Tensor]], None],
        folder: Path,
        report: Reporter = silent_reporter,
    ) -> None:
        """probe and write: used on rank 0 only. folder: the best weights are in folder/STEP."""
        self._probe, self._write, self._folder, self._report = probe, write, folder, report

    def __call__(self, trainer: Trainer) -> None:
        state = gathered(trainer.loss, rank=trainer.rank)
        found = on_rank_zero(lambda: self._look(trainer, state), rank=trainer.rank, workers=trainer.workers)
        probing = trainer.probing
        probing.points.append(found["point"])
        probing.verdict = found["verdict"] and f"at step {trainer.step}: {found['verdict']}"
        if found["best"]:
            probing.best = {"step": trainer.step, "tpf": found["point"]["tpf"]}

    def _look(self, trainer: Trainer, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Rank 0's part. Earlier best weights stay as long as a checkpoint may name them: two are kept, and one may still be on its way."""
        result = self._probe(state)
        point = told(result, trainer.step, self._report)
        before = trainer.probing.best
        best = result.verdict is None and (before is None or result.metrics["tpf"] > before["tpf"])
        if best:
            kept = sorted((old for old in self._folder.glob("[0-9]*")), key=lambda old: int(old.name))
            for old in kept[:-EARLIER]:
                if before is None or old.name != str(before["step"]):
                    shutil.rmtree(old)
            self._folder.mkdir(exist_ok=True)
            self._write(self._folder / str(trainer.step), state)
        return {"point": point, "verdict": result.verdict, "best": best}


def told(result: ProbeResult, step: int, report: Reporter) -> dict[str, Any]:
    """The point of Probing that `result` makes; the tracker hears of it too."""
    report({f"probe/{name}": value for name, value in result.metrics.items()}, step)
    return {"step": step, **result.metrics, "accepted_by_position": list(result.accepted_by_position)}
