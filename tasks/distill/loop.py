"""The training loop of one rank: data -> loss -> step -> report -> checkpoint. Knows torch and FSDP2, not Ray.

The caller supplies the two callables that reach outside: `log` (numbers at a step) and `save` (a checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, get_scheduler

from jacobi_core.distillation.losses import LossTerms, loss_terms
from jacobi_core.distillation.packing import PackedRow, batch_rows
from tasks.artifacts import PackedRows
from tasks.distill import checkpoint
from tasks.distill.config import DistillConfig
from tasks.distill.data import StepPlan

LENGTH_MULTIPLE = 64  # batches are padded to a multiple of this, so that few shapes occur


@dataclass
class Trainer:
    """One rank's side of the distillation of `model` (already sharded, or plain in a single process)."""

    model: PreTrainedModel
    rows: PackedRows
    plan: StepPlan
    config: DistillConfig
    rank: int = 0
    workers: int = 1
    step: int = 0
    curves: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        c = self.config
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=c.learning_rate, weight_decay=c.weight_decay, betas=(0.9, 0.95))
        warmup = round(c.warmup_share * self.plan.total_steps)
        self.scheduler = get_scheduler(c.lr_schedule.value, self.optimizer, num_warmup_steps=warmup, num_training_steps=self.plan.total_steps)
        self._sums = torch.zeros(5, dtype=torch.float64, device=self.device)  # consistency, ar, agreement, their two token counts

    def resume(self, folder: Path) -> None:
        """Continue exactly where the checkpoint in `folder` was taken."""
        progress = checkpoint.load(folder, self.model, self.optimizer)
        self.step, self.curves = progress["step"], progress["curves"]
        self.scheduler.load_state_dict(progress["scheduler"])

    def progress(self) -> dict[str, Any]:
        return {"step": self.step, "scheduler": self.scheduler.state_dict(), "curves": self.curves}

    def run(self, *, log: Callable[[dict[str, float], int], None], save: Callable[[Trainer], None]) -> None:
        """Train to the plan's last step."""
        self.model.train()
        while self.step < self.plan.total_steps:
            gradient_norm = self._train_step()
            self.step += 1
            last = self.step == self.plan.total_steps
            if self.step % self.config.log_every == 0 or last:
                point = self._point(gradient_norm)
                self.curves.append({"step": self.step, **point})
                log(point, self.step)
            if self.step % self.config.checkpoint_every == 0 or last:
                save(self)

    def _train_step(self) -> torch.Tensor:
        # 1. every loss is divided by its token count over the whole global batch: who computes which row cannot matter
        numbers = self.plan.rows(self.step)
        consistency_tokens = max(1, int(self.rows.consistency_tokens[numbers].sum()))
        ar_tokens = max(1, int(self.rows.ar_tokens[numbers].sum()))
        # 2. forwards and backwards; FSDP2 averages gradients over ranks, hence the factor
        for share in self.plan.share(self.step, rank=self.rank, workers=self.workers, accumulation=self.config.accumulation):
            batch = batch_rows([self.rows[i] for i in share], multiple_of=LENGTH_MULTIPLE).to(self.device)
            terms = loss_terms(self.model, batch, variant=self.config.mask, temperature=self.config.temperature)
            loss = terms.consistency / consistency_tokens + self.config.ar_weight * terms.ar / ar_tokens
            (loss * self.workers).backward()
            self._count(terms, batch)
        # 3. one optimizer step
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm

    def _count(self, terms: LossTerms, batch: PackedRow) -> None:
        counts = [(batch.teacher >= 0).sum(), (batch.labels >= 0).sum()]
        self._sums += torch.stack([t.detach().double() for t in (terms.consistency, terms.ar, terms.agreement, *counts)])

    def _point(self, norm: torch.Tensor) -> dict[str, float]:
        """Means since the last point, over all ranks. Collective."""
        if self.workers > 1:
            dist.all_reduce(self._sums)
            norm = norm.full_tensor()
        consistency, ar, agreement, noisy, labelled = self._sums.tolist()
        self._sums.zero_()
        consistency, ar = consistency / max(noisy, 1), ar / max(labelled, 1)
        return {
            "loss": consistency + self.config.ar_weight * ar,
            "consistency": consistency,
            "ar": ar,
            "agreement": agreement / max(noisy, 1),  # share of counted noisy tokens whose argmax is the teacher's
            "gradient_norm": float(norm),
            "learning_rate": self.scheduler.get_last_lr()[0],
            "tokens": int(self.rows.lengths[self.plan.order[: self.step * self.plan.batch_size]].sum()),
        }
