"""Which packed rows make up which step: a pure function of the config, so the position in the data is one integer.

No files and no torch here (architecture.md, traps: Ray Data has no position inside an epoch).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.distill.config import DistillConfig
from tasks.stage import UserError


@dataclass(frozen=True)
class StepPlan:
    """Row numbers in training order, batch_size per step; as many steps as config or token budget ask for."""

    order: np.ndarray  # long [total_steps * batch_size]
    batch_size: int

    @classmethod
    def make(cls, config: DistillConfig, lengths: np.ndarray, *, token_budget: int | None = None) -> StepPlan:
        """lengths: tokens of every packed row. token_budget: stop at the first step that reaches it, whatever epochs says.

        Raises UserError where the rows do not fill one step.
        """
        rows, size = len(lengths), config.batch_size
        if rows < size:
            raise UserError(f"distill.batch_size={size} is more than the {rows} packed rows there are: lower it or use more prompts")
        steps = max(1, int(config.epochs * rows) // size)
        if token_budget is not None:
            steps = -(-token_budget // max(1, int(lengths.mean() * size))) + 2  # an upper guess, cut below
        epochs = -(-steps * size // rows)
        order = np.concatenate([np.random.default_rng([config.seed, epoch]).permutation(rows) for epoch in range(epochs)])
        if token_budget is not None:
            reached = lengths[order].cumsum()[size - 1 :: size]
            steps = min(int(np.searchsorted(reached, token_budget)) + 1, len(order) // size)
        if config.max_steps is not None:
            steps = min(steps, config.max_steps)
        return cls(order=order[: steps * size], batch_size=size)

    @property
    def total_steps(self) -> int:
        return len(self.order) // self.batch_size

    def tokens(self, lengths: np.ndarray) -> int:
        """Of all steps; lengths as in `make`."""
        return int(lengths[self.order].sum())

    def rows(self, step: int) -> np.ndarray:
        """All rows of a step, [batch_size]."""
        return self.order[step * self.batch_size : (step + 1) * self.batch_size]

    def share(self, step: int, *, rank: int, workers: int, accumulation: int) -> list[np.ndarray]:
        """One worker's rows of a step, one array per forward."""
        return np.split(self.rows(step).reshape(workers, -1)[rank], accumulation)


def check_divides(config: DistillConfig, workers: int) -> None:
    """Raises UserError where the batch cannot be shared evenly."""
    if config.batch_size % (workers * config.accumulation):
        raise UserError(
            f"distill.batch_size={config.batch_size} is not divisible by cluster.workers={workers} x distill.accumulation={config.accumulation}: "
            "change one of them, or let fewer train (cluster.train_workers)"
        )
