"""What every stage is given and gives back; knows nothing about any one stage, Hydra or MLflow.

A stage is a module with a plain dataclass of settings and

    run(config, inputs, output, context) -> metrics

`inputs` maps a name ("prompts", "model", ...) to the finished output folder of an upstream stage, `output` is the stage's own
folder (it exists; a resumable stage may find its own unfinished files there), and `metrics` is a flat dict of numbers.
Stage modules import torch and ray inside `run`, so that composing and fingerprinting a pipeline stays light.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

# metadata of a config field that cannot change a result (a path, a log interval): it stays out of the stage's fingerprint
NOT_HASHED = {"fingerprint": False}


class UserError(ValueError):
    """A mistake in a config, path, checkpoint or data row. Its message is one line that names the field or file and the fix."""


DTYPES = ("float32", "bfloat16", "float64")


def check_dtype(name: str, value: str) -> None:
    """Raises ValueError for a dtype no stage can compute in."""
    if value not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got {value!r}")


class Reporter(Protocol):
    """Picklable; logs a flat dict of numbers at an integer step while a stage runs. Never raises."""

    def __call__(self, metrics: Mapping[str, float], step: int) -> None: ...


def silent_reporter(metrics: Mapping[str, float], step: int) -> None:
    """The reporter of a stage run outside a tracked pipeline."""


@dataclass
class ClusterConfig:
    """Where work runs. Never part of a fingerprint: none of these may change a result."""

    address: str | None = None  # Ray address of an existing cluster; None starts a local one
    num_cpus: int = 4  # logical CPUs of a local Ray; more than the cores, so that readers are never starved by actors
    workers: int = 2  # actors that generate trajectories, and ranks that train
    train_workers: int | None = None  # ranks that train, where a small batch cannot be shared by all of `workers`
    min_workers: int | None = None  # actors to begin with, where the cluster grows while it works; all of `workers` by default
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    threads_per_worker: int = 1  # torch threads inside one worker
    parallel_stages: int | None = None  # stages at once; none: as there is room for, see pipelines/graph/room.py; 1: one after another

    @property
    def ranks(self) -> int:
        """That train."""
        return self.workers if self.train_workers is None else self.train_workers


@dataclass
class StageContext:
    """What a stage may use besides its inputs."""

    report: Reporter = silent_reporter
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    trust_remote_code: bool = False  # may a checkpoint bring its own Python code?
