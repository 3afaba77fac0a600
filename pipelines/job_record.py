"""`job.json` in a run's folder: what was asked for, where its stages lie, how it ended. What a sweep's table is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
    state: str = "unfinished"  # then "finished" or "failed"
    error: str | None = None  # one line

    def save(self) -> None:
        values = {name: value for name, value in asdict(self).items() if name != "folder"}
        write_json(self.folder / JOB, {"schema_version": SCHEMA_VERSION, **values})
