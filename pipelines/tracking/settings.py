"""The `tracking` section of the config: what MLflow is told besides runs, params and metrics."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

NOT_IN_NAMES = re.compile(r"[/:'\"`]")  # of registered models
RESERVED = re.compile(r"latest|v\d+", re.IGNORECASE)


@dataclass
class TrackingConfig:
    experiment: str = "jacobi-forcing"  # of MLflow; all runs of a project stand in one
    register: bool = True  # exports become versions of a registered model
    model: str | None = None  # its name; none: the run's
    alias: str = "newest"  # moved to the last export of every run that ends well
    system_metrics_every: float = 10.0  # seconds between two looks at CPU, memory, disk, network and GPUs of the driver's machine; 0: none
    wait_at_end: float = 30.0  # seconds a finished run waits for a store that is away, before it leaves its records in a file

    def __post_init__(self) -> None:
        if not self.experiment.strip():
            raise ValueError("experiment must not be empty")
        if self.model is not None and (not self.model.strip() or NOT_IN_NAMES.search(self.model)):
            raise ValueError(f"model={self.model!r}: a registered model's name is not empty and has no slash, colon or quotation mark")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.alias) or RESERVED.fullmatch(self.alias):
            raise ValueError(f"alias={self.alias!r}: MLflow takes letters, digits, _ and -, and keeps latest and v1, v2, ... to itself")
        for name in ("system_metrics_every", "wait_at_end"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number and not below 0, got {getattr(self, name)}")
