"""Packed rows on disk: written as a stream, read at random. docs/schemas.md has the columns.

A row group holds about GROUP_TOKENS tokens whatever the length of its rows, so a writer's memory and the cost of reading one row
(a row group is decoded for it) stay the same.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from tasks.artifacts import new_file, open_table, schema_of
from tasks.stage import UserError

if TYPE_CHECKING:
    from jacobi_core.distillation.packing import PackedRow

TOKEN_FIELDS = ("input_ids", "position_ids", "sample", "kind", "block", "window", "labels", "teacher")  # those of PackedRow
COUNTS = ("tokens", "consistency_tokens", "ar_tokens")  # per row: what plans and losses need to know of rows that they do not read
PACKED = schema_of("packed", [*((name, pa.list_(pa.int32())) for name in TOKEN_FIELDS), *((name, pa.int32()) for name in COUNTS)], version=2)
GROUP_TOKENS = 32_768  # of a row group: 16 rows of 2048 tokens, decoded in 1-2 ms
SHAPES, BUCKET_STEP = 8, 64  # how many padded lengths may occur; of what their distance is a multiple


def write_packed(path: Path, rows: Iterable[PackedRow], *, schedule: NoiseSchedule, max_length: int) -> None:
    """Atomic and durable; holds one row group at a time. max_length: tokens that no row exceeds."""
    about = {"schedule": json.dumps(asdict(schedule)), "max_length": str(max_length)}
    schema = PACKED.with_metadata({**(PACKED.metadata or {}), **about})
    # without dictionaries and statistics: a quarter smaller, and read a fifth faster
    with (
        new_file(path) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd", use_dictionary=False, write_statistics=False) as writer,
    ):
        group: list[PackedRow] = []
        for row in rows:
            group.append(row)
            if sum(map(len, group)) >= GROUP_TOKENS:
                writer.write_table(_table(group, schema))
                group = []
        if group:
            writer.write_table(_table(group, schema))


def _table(rows: Sequence[PackedRow], schema: pa.Schema) -> pa.Table:
    from jacobi_core.distillation.packing import IGNORE

    offsets = pa.array(np.cumsum([0, *map(len, rows)]), pa.int32())
    lists = [
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([getattr(row, name).numpy() for row in rows]), pa.int32())) for name in TOKEN_FIELDS
    ]
    counts = zip(*((len(row), int((row.teacher >= 0).sum()), int((row.labels != IGNORE).sum())) for row in rows), strict=True)
    return pa.Table.from_arrays([*lists, *(pa.array(column, pa.int32()) for column in counts)], schema=schema)


class PackedRows:
    """The counts of all rows of a file, and the rows themselves on demand, from any thread.

    lengths, consistency_tokens, ar_tokens: int32 [rows]; window: w of the schedule, in blocks; max_length: tokens that no row exceeds;
    bucket: batches padded to a multiple of it have at most SHAPES lengths. Raises UserError naming the file where it is missing or is not what
    it should be; reading rows raises OSError as it comes where the disk or the network failed: trying again may help.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._file = open_table(path, PACKED)
        metadata = self._file.schema_arrow.metadata
        try:
            self.window = int(json.loads(metadata[b"schedule"])["window"])
            self.max_length = int(metadata[b"max_length"])
        except (ValueError, KeyError, TypeError) as error:
            raise _broken(self._path, error) from error
        with naming_broken_bytes(self._path):
            counts = self._file.read(columns=list(COUNTS))
        self.lengths, self.consistency_tokens, self.ar_tokens = (counts[name].to_numpy() for name in COUNTS)
        footer = self._file.metadata
        self._ends = np.cumsum([footer.row_group(group).num_rows for group in range(footer.num_row_groups)])  # row numbers, exclusive

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def bucket(self) -> int:
        return -(-self.max_length // (SHAPES * BUCKET_STEP)) * BUCKET_STEP

    def read(self, indices: Sequence[int]) -> list[PackedRow]:
        """The rows with these numbers, fields long [L], in the order asked for. Decodes only the row groups they stand in."""
        import torch

        from jacobi_core.distillation.packing import PackedRow

        wanted = np.asarray(indices, dtype=np.int64)
        assert ((wanted >= 0) & (wanted < len(self))).all(), f"{indices} of {len(self)} rows"
        groups = np.searchsorted(self._ends, wanted, side="right")
        found: dict[int, PackedRow] = {}
        for group in np.unique(groups):
            columns = self._read_group(int(group))
            first = self._ends[group] - len(columns)
            for index in np.unique(wanted[groups == group]):
                values = _fields(columns, int(index - first))
                found[int(index)] = PackedRow(**{name: torch.from_numpy(value.astype(np.int64)) for name, value in values.items()})
        return [found[int(index)] for index in wanted]

    def first(self) -> dict[str, np.ndarray]:
        """The fields of the first row, int32 [L], without torch; the file must hold a row."""
        return _fields(self._read_group(0), 0)

    def _read_group(self, group: int) -> pa.Table:
        with naming_broken_bytes(self._path), self._lock:  # one file handle, which seeks
            return self._file.read_row_group(group, columns=list(TOKEN_FIELDS), use_threads=False).combine_chunks()


def _fields(group: pa.Table, row: int) -> dict[str, np.ndarray]:
    return {name: group[name].chunk(0)[row].values.to_numpy() for name in TOKEN_FIELDS}


@contextmanager
def naming_broken_bytes(path: Path) -> Iterator[None]:
    """UserError for bytes that are no packed file; what the system could not read goes through, it may be read the next time.

    pyarrow says OSError of both, of the latter with the system's errno.
    """
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: not a readable packed file ({error}); recompute the pack stage (force=[...])")
