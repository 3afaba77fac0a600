"""Settings of the distillation stage; free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from jacobi_core.distillation.attention_variant import MaskVariant
from tasks.stage import NOT_HASHED, check_dtype


class LrSchedule(str, Enum):
    """Schedules of transformers.get_scheduler that need no further settings."""

    cosine = "cosine"
    linear = "linear"
    constant_with_warmup = "constant_with_warmup"


@dataclass
class DistillConfig:
    """Raises ValueError naming the field for a value that cannot be used."""

    learning_rate: float = 1e-6  # peak
    batch_size: int = 4  # packed rows per optimizer step, over all workers
    accumulation: int = 1  # forwards per worker and step; workers x accumulation must divide batch_size
    epochs: float = 1.0  # passes over the packed rows, unless max_steps ends earlier
    max_steps: int | None = None
    ar_weight: float = 1.0  # w in L = L_pc + w L_ar
    temperature: float = 1.0  # of the consistency loss
    mask: MaskVariant = MaskVariant.nc
    lr_schedule: LrSchedule = LrSchedule.cosine
    warmup_share: float = 0.03  # of all steps
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0  # of the row order
    dtype: str = "float32"  # of the master weights; on a GPU compute is bfloat16
    checkpoint_every: int = field(default=200, metadata=NOT_HASHED)  # steps
    log_every: int = 10  # steps

    def __post_init__(self) -> None:
        self.mask, self.lr_schedule = MaskVariant(self.mask), LrSchedule(self.lr_schedule)
        check_dtype("dtype", self.dtype)
        for name in ("batch_size", "accumulation", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "epochs", "temperature", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")
        if self.checkpoint_every % self.log_every:  # curves are means since the last point; a resumed run must find none half-summed
            raise ValueError(f"checkpoint_every must be a multiple of log_every={self.log_every}, got {self.checkpoint_every}")
