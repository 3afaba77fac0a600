"""`job.json` in a run's folder: what was asked for, where its stages lie, how it ended. What a sweep's table is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipelines.credentials import redacted_values
from tasks.artifacts import write_json

JOB = "job.json"
SCHEMA_VERSION = 1


@dataclass
class JobRecord:
    """Written anew at every step, so that a killed run leaves its state too."""

    folder: Path  # of the run
    number: int  # of the job in its sweep; 0 of a single run
    overrides: list[str]
    config: Mapping[str, Any] | None = None  # the whole of it; None where it could not be built
    stages: dict[str, str] = field(default_factory=dict)  # id -> folder in the store
    cached: int = 0  # how many of them were finished before
    state: str = "unfinished"  # then "finished", "failed", or "skipped" after another job's failure
    code: int = 0  # exit code of the job alone
    error: str | None = None  # a line per mistake

    def save(self) -> None:
        values = {name: value for name, value in asdict(self).items() if name != "folder"}
        write_json(self.folder / JOB, {"schema_version": SCHEMA_VERSION, **redacted_values(values)})
