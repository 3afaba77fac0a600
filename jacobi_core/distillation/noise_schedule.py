"""Which state of each block is trained on: target noise ratios, and the recorded states nearest to them (algorithm section 3).

Free of torch at import time, so that configs can be composed without it.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import ceil, floor

KINDS = (
    "linear",  # noise grows inside every window (paper eq. 7)
    "random",  # uniform, seeded per (sample, block)
    "reverse",  # the linear window backwards
    "cllm",  # the CLLM* baseline: random over all ratios with window 1, so that every noisy block conditions on clean text only
)


class ScheduleError(ValueError):
    """A schedule that does not exist or does not do what it must; the message is one line that begins with `noise_schedule`."""


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
    seed: int = 0  # of the schedules that draw at random

    def __post_init__(self) -> None:
        self.endpoints, self.rounding = Endpoints(self.endpoints), Rounding(self.rounding)
        if not 0.0 <= self.t_min <= self.t_max <= 1.0:
            raise ValueError(f"t_min and t_max must satisfy 0 <= t_min <= t_max <= 1, got t_min={self.t_min}, t_max={self.t_max}")


@dataclass
class NoiseSchedule(ScheduleShape):
    """A schedule in full. kind: one of KINDS, or a function of your own as `package.module:function`, called with what target_ratios says."""

    kind: str = "linear"
    window: int = 16  # w, in blocks; longer than the answers it never reaches t_max

    def __post_init__(self) -> None:
        if self.kind == "cllm":  # one setting, not five: these are what makes it the baseline
            self.window, self.t_min, self.t_max = 1, 0.0, 1.0
        super().__post_init__()
        check_kind(self.kind)
        if self.window < 1:
            raise ValueError(f"window must be at least 1 block, got {self.window}")


def is_own(kind: str) -> bool:
    """Is it a user's function, by its path?"""
    return kind not in KINDS and ("." in kind or ":" in kind)


def check_kind(kind: str) -> None:
    """Imports nothing. Raises ScheduleError for a name that is neither known nor a path."""
    if kind not in KINDS and not is_own(kind):
        raise ScheduleError(f"noise_schedule={kind}: no such schedule; known: {', '.join(KINDS)}, or your own as package.module:function")


def load_own(kind: str) -> Callable[..., list[float]]:
    """The function that `package.module:function` or `package.module.function` names. Raises ScheduleError where there is none."""
    module, _, name = kind.partition(":") if ":" in kind else kind.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise ScheduleError(f"noise_schedule={kind}: cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})") from error
    if not callable(function):
        raise ScheduleError(f"noise_schedule={kind}: is a {type(function).__name__}, not a function")
    return function


def target_ratios(schedule: NoiseSchedule, *, num_blocks: int, block_size: int, sample_id: int) -> list[float]:
    """Target noise ratio t_i of every block, in [0, 1].

    A user's own function is called with num_blocks, block_size, window, t_min, t_max, seed and sample_id, all by keyword, and
    returns num_blocks numbers in [0, 1]; ScheduleError where it does not. The same arguments must give the same numbers.
    """
    if is_own(schedule.kind):
        return _own_ratios(schedule, num_blocks=num_blocks, block_size=block_size, sample_id=sample_id)
    if schedule.kind in ("random", "cllm"):
        return [_uniform_ratio(schedule, block_size, sample_id, i) for i in range(num_blocks)]
    w, low, high = schedule.window, schedule.t_min, schedule.t_max
    if w == 1:
        window = [high]
    else:
        steps = w - 1 if schedule.endpoints is Endpoints.linspace else w
        window = [low + (high - low) * j / steps for j in range(w)]
    if schedule.kind == "reverse":
        window.reverse()
    return [window[i % w] for i in range(num_blocks)]


def _own_ratios(schedule: NoiseSchedule, **sample: int) -> list[float]:
    function, kind = load_own(schedule.kind), schedule.kind
    try:
        ratios = [float(t) for t in function(**sample, window=schedule.window, t_min=schedule.t_min, t_max=schedule.t_max, seed=schedule.seed)]
    except Exception as error:  # a user's code
        raise ScheduleError(f"noise_schedule={kind}: failed for {sample} ({type(error).__name__}: {' '.join(str(error).split())})") from error
    if len(ratios) != sample["num_blocks"]:
        raise ScheduleError(f"noise_schedule={kind}: gave {len(ratios)} noise ratios for {sample['num_blocks']} blocks")
    wrong = [t for t in ratios if not 0.0 <= t <= 1.0]  # NaN too
    if wrong:
        raise ScheduleError(f"noise_schedule={kind}: gave a noise ratio of {wrong[0]}, which must be from 0 to 1")
    return ratios


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
