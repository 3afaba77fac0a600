"""The training loop of one rank: data -> loss -> step -> log -> probe -> checkpoint. Knows torch and FSDP2, not Ray, and no files.

Whatever cuts a run up (ranks, accumulation, a stop, a resume) leaves its result as it is: a step's rows and loss weights are functions of the
config and the step alone. With dropout that holds for the same cut only: the draws are a function of step and forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jacobi_core.distillation.losses import PackedLoss
from jacobi_core.distillation.packing import IGNORE, PackedRow, batch_rows
from tasks.distill import checkpoint
from tasks.distill.config import DistillConfig
from tasks.distill.curves import Curves
from tasks.distill.data import StepPlan
from tasks.distill.optimizer import clip_gradients, make_optimizer
from tasks.distill.prefetch import Prefetch
from tasks.distill.sharding import products_in
from tasks.packed_files import PackedRows
from tasks.stage import UserError


@dataclass
class Probing:
    """What the watch over the model has said so far. Equal on every rank."""

    points: list[dict[str, float]] = field(default_factory=list)  # step and metrics
    best: dict[str, float] | None = None  # the healthy one with the most tokens per forward
    verdict: str | None = None  # why training ended early


class Trainer:
    """One rank's side of the distillation by `loss`, a PackedLoss (already sharded, or plain in a single process)."""

    def __init__(self, loss: PackedLoss, rows: PackedRows, plan: StepPlan, config: DistillConfig, *, rank: int = 0, workers: int = 1) -> None:
        self.loss, self.rows, self.plan, self.config, self.rank, self.workers = loss, rows, plan, config, rank, workers
        self.device = next(loss.parameters()).device
        self.optimizer, self.scheduler = make_optimizer(loss, config, total_steps=plan.total_steps)
        self.curves = Curves(window=loss.window, ar_weight=config.ar_weight, device=self.device, workers=workers)
        self.probing = Probing()
        self.step = 0  # finished ones: the position in data, schedule and random numbers
        self._saved = 0  # step of the last checkpoint
        self._tokens = np.concatenate([[0], rows.lengths[plan.order].reshape(-1, plan.batch_size).sum(1).cumsum()])  # packed, after each step
        self._norm = torch.zeros((), device=self.device)
        self._seconds, self._since = 0.0, time.monotonic()

    @property
    def tokens(self) -> int:
        """Packed tokens trained on so far."""
        return self.tokens_after(self.step)

    def tokens_after(self, step: int) -> int:
        return int(self._tokens[step])

    @property
    def seconds(self) -> float:
        """Of training, in all processes that had a part in it: what a killed one did after its last checkpoint is lost."""
        return self._seconds + time.monotonic() - self._since

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train: the plan's last step is done, or the probe has ended it."""
        return self.step == self.plan.total_steps or self.probing.verdict is not None

    def state(self) -> dict[str, Any]:
        """All but the tensors, as JSON types."""
        return {
            "step": self.step,
            "scheduler": self.scheduler.state_dict(),
            "curves": self.curves.state(),
            "probing": vars(self.probing),
            "seconds": self.seconds,
        }

    def save(self, folder: Path) -> None:
        """Collective."""
        self._check_gradients()
        checkpoint.save(folder, self.loss, self.optimizer, self.state(), rank=self.rank)
        self._saved = self.step

    def resume(self, folder: Path) -> None:
        """Continue exactly where the checkpoint in `folder` was taken, by however many ranks. Collective."""
        state = checkpoint.load(folder, self.loss, self.optimizer)
        self.step = self._saved = state["step"]
        self.scheduler.load_state_dict(state["scheduler"])
        self.curves.load_state(state["curves"], tokens=self.tokens)
        self.probing = Probing(**state["probing"])
        self._seconds, self._since = state["seconds"], time.monotonic()

    def run(
        self,
        *,
        log: Callable[[dict[str, float], int], None],
        save: Callable[[Trainer], None],
        probe: Callable[[Trainer], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train until `finished`, or until stop() says so, on every rank at the same step.

        log: numbers at a step; save: a checkpoint, by Trainer.save; probe: measures the model and enters it into `probing`.
        Raises UserError where a gradient is no number.
        """
        batches = Prefetch(self._load, stop=self.plan.total_steps)
        self.loss.train()
        try:
            while not self.finished and not stop():
                norm = self._train_step(batches(self.step))
                self.step += 1
                last = self.step == self.plan.total_steps
                logged = self.step % self.config.log_every == 0 or last
                if logged:
                    self._check_gradients()
                    log(self._point(norm, batches.waited), self.step)
                probed = probe is not None and (self.step % self.config.probe.every == 0 or last)
                if probed:
                    self._check_gradients()
                    probe(self)
                    self.loss.train()
                    if self.finished and not logged:  # the probe has ended it: no step goes without a point
                        log(self._point(norm, batches.waited), self.step)
                if not last and (probed or self.step % self.config.checkpoint_every == 0):
                    save(self)
            if self.step != self._saved:
                save(self)
        finally:
            batches.close()

    def _load(self, step: int) -> list[PackedRow]:
        """This rank's forwards of a step, on the CPU."""
        shares = self.plan.share(step, rank=self.rank, workers=self.workers, accumulation=self.config.accumulation)
        return [batch_rows(self.rows.read(share), multiple_of=self.rows.bucket) for share in shares]

    def _train_step(self, batches: list[PackedRow]) -> torch.Tensor:
        # 1. every loss is divided by its token count over the whole global batch: who computes which row cannot matter.
        #    FSDP2 averages gradients over ranks, hence the factor
        numbers = self.plan.rows(self.step)
        consistency_weight = self.workers / max(1, int(self.rows.consistency_tokens[numbers].sum()))
        ar_weight = self.workers * self.config.ar_weight / max(1, int(self.rows.ar_tokens[numbers].sum()))
        # 2. forwards and backwards; dropout of a forward depends on its rows' place in the step, not on who computes it
        for number, batch in enumerate(batches):
            torch.manual_seed(_seed(self.config.seed, self.step, self.rank * self.config.accumulation + number))
            labels = int((batch.labels != IGNORE).sum())
            with products_in(self.config.compute_dtype, self.device):
                terms = self.loss(batch.to(self.device), consistency_weight=consistency_weight, ar_weight=ar_weight)
            terms.loss.backward()
            self.curves.add(terms, labels)
        # 3. one optimizer step
        norm = clip_gradients(self.loss, self.config.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.curves.end_step()
        self._norm = self._norm + norm.detach()  # no number once one was none: asked when somebody waits for the device anyway
        return norm

    def _point(self, norm: torch.Tensor, waited: float) -> dict[str, float]:
        rate = self.scheduler.get_last_lr()[0]
        return self.curves.point(self.step, gradient_norm=float(norm), learning_rate=rate, tokens=self.tokens, waited=waited)

    def _check_gradients(self) -> None:
        """The norm is the same on every rank, so all of them raise."""
        if not torch.isfinite(self._norm):
            raise UserError(
                f"distill: a gradient was not a finite number at or before step {self.step}; nothing of it was saved. Lower distill.learning_rate "
                f"({self.config.learning_rate:g}), raise distill.warmup_share or distill.temperature, and run again"
            )


def _seed(*position: int) -> int:
    return int(np.random.SeedSequence(position).generate_state(1, np.uint64)[0] >> 1)
