"""Which state of each block is trained on: target noise ratios, and the recorded states nearest to them (algorithm section 3).

Free of torch at import time, so that configs can be composed without it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from math import ceil, floor


class ScheduleKind(str, Enum):
    linear = "linear"  # noise grows inside every window (paper eq. 7)
    random = "random"  # uniform, seeded per (sample, block)
    reverse = "reverse"  # the linear window backwards


class Endpoints(str, Enum):
    linspace = "linspace"  # t_min .. t_max inclusive: the released code; the last block of a window is all noise
    paper = "paper"  # {0, 1/w, ..., (w-1)/w}, scaled to t_min .. t_max


class Rounding(str, Enum):
    nearest = "nearest"
    ceil = "ceil"  # the paper's


@dataclass
class ScheduleShape:
    """What stays the same while kinds and windows are swept. Raises ValueError for a value that cannot be used, naming the field."""

    t_min: float = 0.0  # smallest target noise ratio
    t_max: float = 1.0  # largest target noise ratio
    endpoints: Endpoints = Endpoints.linspace
    rounding: Rounding = Rounding.nearest
    seed: int = 0  # of the random schedule

    def __post_init__(self) -> None:
        self.endpoints, self.rounding = Endpoints(self.endpoints), Rounding(self.rounding)
        if not 0.0 <= self.t_min <= self.t_max <= 1.0:
            raise ValueError(f"t_min and t_max must satisfy 0 <= t_min <= t_max <= 1, got t_min={self.t_min}, t_max={self.t_max}")


@dataclass
class NoiseSchedule(ScheduleShape):
    """A schedule in full. window=1 with kind=random is the CLLM* baseline."""

    kind: ScheduleKind = ScheduleKind.linear
    window: int = 16  # w, in blocks; longer than the answers it never reaches t_max

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kind = ScheduleKind(self.kind)
        if self.window < 1:
            raise ValueError(f"window must be at least 1 block, got {self.window}")


def target_ratios(schedule: NoiseSchedule, *, num_blocks: int, block_size: int, sample_id: int) -> list[float]:
    """Target noise ratio t_i of every block, in [0, 1]."""
    if schedule.kind is ScheduleKind.random:
        return [_uniform_ratio(schedule, block_size, sample_id, i) for i in range(num_blocks)]
    w, low, high = schedule.window, schedule.t_min, schedule.t_max
    if w == 1:
        window = [high]
    else:
        steps = w - 1 if schedule.endpoints is Endpoints.linspace else w
        window = [low + (high - low) * j / steps for j in range(w)]
    if schedule.kind is ScheduleKind.reverse:
        window.reverse()
    return [window[i % w] for i in range(num_blocks)]


def _uniform_ratio(schedule: NoiseSchedule, block_size: int, sample_id: int, block: int) -> float:
    """Uniform on the k/n (k = 1..n) inside t_min..t_max; on t_max alone where none is."""
    choices = [k / block_size for k in range(1, block_size + 1) if schedule.t_min <= k / block_size <= schedule.t_max] or [schedule.t_max]
    digest = hashlib.sha256(f"{schedule.seed}:{sample_id}:{block}".encode()).digest()
    return choices[int.from_bytes(digest[:8], "big") % len(choices)]


def target_count(ratio: float, tokens: int, rounding: Rounding) -> int:
    """Target number of noisy tokens in a block of `tokens`."""
    return ceil(ratio * tokens - 1e-9) if rounding is Rounding.ceil else floor(ratio * tokens + 0.5)


def nearest_state(unconverged: list[int], target: int) -> int:
    """Index of the state whose number of unconverged tokens is nearest to target; ties go to the earlier, noisier state."""
    return min(range(len(unconverged)), key=lambda j: (abs(unconverged[j] - target), j))
