"""Collectors that go wrong in a chosen way, once or always. No torch; importable by Ray's workers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tasks.artifacts import Prompt
from tasks.trajectory_files import TrajectoryRow

BLOCK_SIZE = 4


def trajectory_of(prompt: Prompt) -> TrajectoryRow:
    """A pure function of the prompt: 1 to 40 tokens, blocks of 1 to 5 states."""
    rng = np.random.default_rng(prompt.id)
    answer = rng.integers(10, 90, rng.integers(1, 40)).astype(np.int32)
    states = []
    for start in range(0, len(answer), BLOCK_SIZE):
        fixed = answer[start : start + BLOCK_SIZE]
        prefixes = sorted(rng.permutation(len(fixed))[: rng.integers(0, 5)])
        noisy = [np.where(np.arange(len(fixed)) < p, fixed, fixed + rng.integers(1, 9, len(fixed))) for p in prefixes]
        states.append(np.array([*noisy, fixed], np.int32))
    return TrajectoryRow(prompt.id, np.array(prompt.input_ids, np.int32), answer, "eos", BLOCK_SIZE, states)


@dataclass(frozen=True)
class Collected:
    trajectories: list[TrajectoryRow]
    disagreements: int = 0
    dropped: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Faulty:
    """Picklable; calling it makes a collector. `once`: a file that is there as soon as it went wrong; without it, it always does."""

    dies: bool = False  # ends its process in the shard that holds `at`
    dies_at_start: bool = False
    hangs: bool = False
    at: int | None = None  # id of the prompt that is bad; any if None
    raises: bool = False
    once: Path | None = None
    seconds: float = 0.0  # per shard

    def _now(self) -> bool:
        if self.once is None:
            return True
        try:
            self.once.open("x").close()
        except FileExistsError:
            return False
        return True

    def __call__(self):
        if self.dies_at_start and self._now():
            os._exit(1)
        return self.collect

    def collect(self, prompts: Sequence[Prompt]) -> Collected:
        time.sleep(self.seconds)
        if self.at is None or any(p.id == self.at for p in prompts):
            if self.dies and self._now():
                os._exit(1)
            if self.hangs and self._now():
                time.sleep(3600)
            if self.raises and self._now():
                raise ValueError("this prompt is poison")
        return Collected([trajectory_of(p) for p in prompts])
