"""Completions on disk: what a model said to a prompt under one decoding setting, and how the decoding went. docs/schemas.md has the columns.

Generated once, scored and tabulated many times: reading needs neither torch nor a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.artifacts import read_schema, read_table, schema_of, write_table
from tasks.stage import UserError

COMPLETIONS = schema_of(
    "completions",
    [
        ("id", pa.int64()),
        ("method", pa.string()),
        ("block_size", pa.int32()),
        ("batch_size", pa.int32()),
        ("batch", pa.int32()),
        ("prompt_tokens", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("stop_reason", pa.string()),
        ("forwards", pa.int32()),
        ("accepted_lengths", pa.list_(pa.int32())),
        ("seconds", pa.float64()),
        ("prefill_seconds", pa.float64()),
        ("degenerate", pa.bool_()),
        ("first_difference", pa.int32()),
        ("margin", pa.float64()),
        ("difference", pa.string()),
    ],
)


@dataclass
class Completion:
    """One prompt under one setting; `seconds` and `prefill_seconds` are None where nobody kept time."""

    id: int  # of the prompt
    method: str  # one of ours, or "transformers" or "prompt_lookup"
    block_size: int  # most tokens that one forward refreshes or verifies; 1 for one token at a time
    batch_size: int  # prompts decoded together (fewer where they ran out)
    batch: int  # number of its batch: rows that were decoded together share it
    prompt_tokens: int
    tokens: list[int]  # EOS included
    text: str
    stop_reason: str  # "eos" or "length"
    forwards: int  # until this prompt's answer ended, the first one (prompt and first draft) counted
    accepted_lengths: list[int]  # tokens committed by each forward
    seconds: float | None = None  # of its batch, divided by the rows of the batch
    prefill_seconds: float | None = None  # until the first forward's tokens were known; divided in the same way
    degenerate: bool = False  # it loops: repetition inflates the tokens per forward
    first_difference: int | None = None  # answer index of the first token that is not greedy AR's; None: equal, or not compared
    margin: float | None = None  # greedy AR's top-2 logit margin there
    difference: str | None = None  # "tie" or "defect"

    @property
    def setting(self) -> tuple[str, int, int]:
        return self.method, self.block_size, self.batch_size


def part_file(folder: Path, kind: str, part: int) -> Path:
    """kind: "answers" (for accuracy) or "speed" (timed)."""
    return folder / f"{kind}-{part:06d}.parquet"


def write_completions(path: Path, completions: Iterable[Completion], *, metadata: Mapping[str, Any]) -> None:
    """metadata: JSON values kept beside the schema's; those of speed parts hold `machine`."""
    names = [f.name for f in fields(Completion)]
    rows = [{name: getattr(c, name) for name in names} for c in completions]
    schema = COMPLETIONS.with_metadata({**COMPLETIONS.metadata, **{k: json.dumps(v) for k, v in metadata.items()}})
    write_table(path, pa.Table.from_pylist(rows, schema=schema))


def read_completions(folder: Path, kind: str) -> Iterator[Completion]:
    """All rows of one kind, in the order of their parts. Raises UserError naming a file that cannot be read or has another version."""
    for path in sorted(folder.glob(f"{kind}-*.parquet")):
        yield from read_part(path)


def read_part(path: Path) -> list[Completion]:
    """The rows of one file. Raises UserError as read_completions does."""
    return [Completion(**row) for row in read_table(path, COMPLETIONS).to_pylist()]


def read_metadata(path: Path) -> dict[str, Any]:
    """What write_completions was given; reads the footer only."""
    metadata = read_schema(path, COMPLETIONS).metadata
    return {k.decode(): json.loads(v) for k, v in metadata.items() if k not in COMPLETIONS.metadata}


def timed_on(folder: Path) -> dict[str, Any]:
    """The machine that the speed parts were timed on. Raises UserError where there are several: their times are not to be added up."""
    machines = [read_metadata(path)["machine"] for path in sorted(folder.glob("speed-*.parquet"))]
    if any(machine != machines[0] for machine in machines):
        raise UserError(f"{folder}: holds times of several machines; delete its speed-*.parquet and time again")
    return machines[0]
