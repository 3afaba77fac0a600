"""Settings of the trajectories stage. Free of torch and ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.trajectories.disagreement import OnDisagreement
from jacobi_core.trajectories.quality import QualityRules
from tasks.stage import NOT_HASHED, check_dtype


class Collect(str, Enum):
    """Which states of a block are kept."""

    all = "all"  # one set serves every noise schedule
    schedule = "schedule"  # the one that the round's schedule trains on: less to compute and store, and good for that schedule only


@dataclass
class TrajectorySettings:
    """What all rounds share. Raises ValueError naming the field for a value that cannot be used, as the one below does."""

    prompts: int | None = None  # how many training prompts; all by default
    max_new_tokens: int = 256  # answers are cut here
    shard_size: int = 256  # prompts of one file: the unit of work, and the most that a crash can cost
    # answers that a worker decodes together. Not hashed, so that a run that met the end of its memory can go on with fewer: in fp64 it
    # cannot change a result, in fp32 about one near-tie in 1e5 tokens
    batch_size: int = field(default=64, metadata=NOT_HASHED)
    seed: int = 0  # of the random first guesses
    dtype: str = "float32"
    collect: Collect = Collect.all
    on_disagreement: OnDisagreement = OnDisagreement.keep  # answer tokens that the teacher-forced check does not predict again
    quality: QualityRules = field(default_factory=QualityRules)  # answers that break a rule are dropped, with a count per reason
    max_bad_share: float = field(default=0.01, metadata=NOT_HASHED)  # of prompts that may be quarantined before the stage fails
    stall_timeout: float = field(default=1800.0, metadata=NOT_HASHED)  # seconds without a finished shard: reported at half, an error in full

    def __post_init__(self) -> None:
        self.collect, self.on_disagreement = Collect(self.collect), OnDisagreement(self.on_disagreement)
        for name in ("max_new_tokens", "shard_size", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_dtype("dtype", self.dtype)
        if self.prompts is not None and self.prompts < 1:
            raise ValueError(f"prompts must be at least 1, got {self.prompts}")
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share must be between 0 and 1, got {self.max_bad_share}")
        if self.stall_timeout <= 0:
            raise ValueError(f"stall_timeout must be above 0, got {self.stall_timeout}")


@dataclass
class GenerateTrajectoriesConfig(TrajectorySettings):
    block_size: int = 16  # n
    schedule: NoiseSchedule | None = None  # of collect=schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if (self.collect is Collect.schedule) != (self.schedule is not None):
            raise ValueError(f"collect={self.collect.value} {'needs' if self.schedule is None else 'takes no'} schedule")
