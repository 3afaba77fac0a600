"""The jobs of a sweep as each of them sees the others, in whatever process: by the files of the sweep's folder. Hydra itself tells of
failures only at the end, and of the first one only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from pipelines.credentials import redacted_values
from pipelines.job_record import JOB
from tasks.artifacts import read_json, write_json

COMMAND = "command.json"  # {"overrides": as they were given, "swept": those of them that stand for many values, by name}

begun: list[Path] = []  # folders of the sweeps that this process has started: it is their exit code that is asked for


def begin(folder: Path, overrides: Sequence[str]) -> None:
    """Called once, before the first job, by the process that starts them."""
    for old in folder.glob(f"*/{JOB}"):  # of the same sweep, begun before: its states are not this one's
        old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    swept = [override.get_key_element() for override in OverridesParser.create().parse_overrides(list(overrides)) if override.is_sweep_override()]
    write_json(folder / COMMAND, {"overrides": redacted_values(list(overrides)), "swept": swept})
    begun.append(folder)


def named(folder: Path, number: int, overrides: Sequence[str]) -> str:
    """A job by what tells it from the others: "job 2 (noise_schedule=reverse)"."""
    command = folder / COMMAND
    swept = read_json(command)["swept"] if command.exists() else []
    own = [text for text in overrides if text.partition("=")[0] in swept]  # their text is no guide: Hydra writes true as True
    return f"job {number} ({' '.join(own)})" if own else f"job {number}"


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """Of the jobs that have begun, by number."""
    yield from sorted((read_json(path) for path in folder.glob(f"*/{JOB}")), key=lambda record: record["number"])


def failed(folder: Path) -> int | None:
    """Number of the first job that failed so far."""
    return next((record["number"] for record in records(folder) if record["state"] == "failed"), None)


def exit_code() -> int:
    """Of the sweeps begun here: the largest of any job. One that has not ended was killed."""
    return max((record["code"] if record["state"] != "unfinished" else 1 for folder in begun for record in records(folder)), default=0)


def told(folder: Path) -> Iterator[str]:
    """What is worth a line when all have ended."""
    jobs = list(records(folder))
    before = [record for record in jobs if record["stages"] and record["cached"] == len(record["stages"])]
    if before:
        yield f"{len(before)} of {len(jobs)} jobs were finished before and taken from the store"
    wrong = [record for record in jobs if record["state"] != "finished"]
    for record in wrong:
        yield f"{named(folder, record['number'], record['overrides'])}: {record['error'] or 'has not ended'}"
    if wrong:
        yield f"{len(wrong)} of {len(jobs)} jobs did not finish; the same command does only these again"
