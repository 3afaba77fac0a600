"""Settings of the distillation stage; free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from tasks.stage import NOT_HASHED, check_dtype


class LrSchedule(str, Enum):
    """Schedules of transformers.get_scheduler that need no further settings."""

    cosine = "cosine"
    linear = "linear"
    constant_with_warmup = "constant_with_warmup"


class Select(str, Enum):
    """Which weights leave the stage."""

    last = "last"  # of the last step; a collapse of the model is an error
    best = "best"  # of the probe with the most tokens per forward; a collapse ends the training there


@dataclass
class LoraSettings:
    """Low-rank adapters (peft) instead of full fine-tuning; export merges them. Raises ValueError naming the field."""

    rank: int = 0  # of the adapters; 0: no adapters, all weights are trained
    alpha: float = 32.0  # adapters are scaled by alpha / rank
    dropout: float = 0.0  # of what goes into an adapter
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])  # names of linear layers; all-linear: all but the head

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must be at least 0, got {self.rank}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        if not self.target_modules:
            raise ValueError("target_modules must name at least one layer, or all-linear")


@dataclass
class ProbeSettings:
    """Decoding a fixed set of prompts now and then. Raises ValueError naming the field."""

    every: int = 200  # steps; and before the first and after the last one; 0: never
    prompts: int = 16  # of the validation split, or of the training split where there is none
    max_new_tokens: int = 128
    block_size: int = 32  # of Jacobi decoding
    collapse_share: float = 0.5  # distinct-2, tokens per answer or EOS rate below this share of the teacher's is a collapse

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every must be at least 0, got {self.every}")
        for name in ("prompts", "max_new_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 <= self.collapse_share <= 1.0:
            raise ValueError(f"collapse_share must be between 0 and 1, got {self.collapse_share}")


@dataclass
class DistillConfig:
    """Raises ValueError naming the field for a value that cannot be used."""

    learning_rate: float = 1e-6  # peak
    batch_size: int = 4  # packed rows per optimizer step, over all workers
    accumulation: int = field(default=1, metadata=NOT_HASHED)  # forwards per worker and step; workers x accumulation must divide batch_size
    epochs: float = 1.0  # passes over the packed rows, unless max_steps ends earlier
    max_steps: int | None = None
    ar_weight: float = 1.0  # w in L = L_pc + w L_ar
    temperature: float = 1.0  # of the consistency loss
    mask: MaskVariant = MaskVariant.nc
    attention: Backend = field(default=Backend.auto, metadata=NOT_HASHED)  # what computes the mask
    lr_schedule: LrSchedule = LrSchedule.cosine
    warmup_share: float = 0.03  # of all steps
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.0  # of matrices; norms and biases have none
    max_grad_norm: float = 1.0
    seed: int = 0  # of the row order, of new adapters and of dropout
    dtype: str = "float32"  # of the master weights
    compute_dtype: str | None = None  # of matrix products: float32, bfloat16; none: bfloat16 on a GPU, the master weights' on a CPU
    activation_checkpointing: bool = field(default=False, metadata=NOT_HASHED)  # a third more compute, a fraction of the memory
    checkpoint_every: int = field(default=200, metadata=NOT_HASHED)  # steps; and after every probe
    log_every: int = 10  # steps
    select: Select = Select.last
    lora: LoraSettings = field(default_factory=LoraSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)

    def __post_init__(self) -> None:
        self.mask, self.attention = MaskVariant(self.mask), Backend(self.attention)
        self.lr_schedule, self.select = LrSchedule(self.lr_schedule), Select(self.select)
        check_dtype("dtype", self.dtype)
        if self.compute_dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"compute_dtype must be float32, bfloat16, or left empty, got {self.compute_dtype!r}")
        for name in ("batch_size", "accumulation", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "epochs", "temperature", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("ar_weight", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("adam_beta1", "adam_beta2", "warmup_share"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")
        if self.select is Select.best and not self.probe.every:
            raise ValueError("select=best needs a probe to choose by: set probe.every to a number of steps")


@dataclass
class Length:
    """How long a distillation goes on; see DistillConfig."""

    epochs: float
    max_steps: int | None


@dataclass
class MatchedDistillConfig(DistillConfig):
    """Of one that sees as many packed tokens as others together, whatever its own epochs say. Set by the pipeline, not by users."""

    matched: dict[str, Length] = field(default_factory=dict)  # by name; their packed rows are the inputs budget/NAME
