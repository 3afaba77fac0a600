"""Trajectories on disk: prompt once, answer once, of every state only what follows its converged prefix. docs/schemas.md has the columns.

Writing and reading rows needs numpy and pyarrow, never torch: a driver and a viewer stay light.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from tasks.artifacts import read_schema, read_table, schema_of, write_table
from tasks.stage import UserError

if TYPE_CHECKING:
    from jacobi_core.trajectories.record import Trajectory

TRAJECTORIES = schema_of(
    "trajectories",
    [
        ("id", pa.int64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("stop_reason", pa.string()),
        ("block_size", pa.int32()),
        ("block_states", pa.list_(pa.int32())),
        ("state_converged", pa.list_(pa.int32())),
        ("state_tokens", pa.list_(pa.int32())),
    ],
    version=2,
)
_LISTS = ("prompt_ids", "answer_ids", "block_states", "state_converged", "state_tokens")
ZSTD_LEVEL = 9  # a few per cent smaller than the default, still faster than any model


class TrajectoryLike(Protocol):
    """What can be written: `jacobi_core`'s Trajectory, TrajectoryRow, or anything with these fields of array-likes."""

    id: int
    prompt_ids: Any
    answer_ids: Any
    stop_reason: str
    block_size: int
    states: Sequence[Any]


@dataclass(frozen=True)
class TrajectoryRow:
    """A `jacobi_core.trajectories.record.Trajectory` in numpy: int32 [L], int32 [t], and per block int32 [number of states, m]."""

    id: int
    prompt_ids: np.ndarray
    answer_ids: np.ndarray
    stop_reason: str
    block_size: int
    states: list[np.ndarray]


def trajectory_part(folder: Path, shard: int) -> Path:
    return folder / f"part-{shard:06d}.parquet"


def trajectory_parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def write_trajectories(path: Path, trajectories: Sequence[TrajectoryLike], *, metadata: Mapping[str, str] | None = None) -> None:
    """metadata: kept beside the schema's. Every block's last state must be its fixed point."""
    columns: dict[str, list[Any]] = {name: [] for name in TRAJECTORIES.names}
    for t in trajectories:
        counts, converged, tokens = encode_states(t.states)
        row = (t.id, np.asarray(t.prompt_ids), np.asarray(t.answer_ids), t.stop_reason, t.block_size, counts, converged, tokens)
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    schema = TRAJECTORIES.with_metadata({**(TRAJECTORIES.metadata or {}), **(metadata or {})})
    arrays = [_list_array(columns[f.name]) if f.name in _LISTS else pa.array(columns[f.name], f.type) for f in schema]
    write_table(path, pa.Table.from_arrays(arrays, schema=schema), level=ZSTD_LEVEL)


def _list_array(values: list[np.ndarray]) -> pa.Array:
    """list<int32> from flat numbers and offsets: ragged rows, empty ones and a single one alike."""
    offsets = np.concatenate([[0], np.cumsum([len(v) for v in values])]).astype(np.int32)
    flat = np.concatenate(values).astype(np.int32) if values else np.empty(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def encode_states(states: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of all blocks in turn: states before the fixed point; their converged prefixes; the tokens that follow those."""
    counts, converged, tokens = [], [], []
    for block in states:
        block = np.asarray(block)
        prefix = np.cumprod(block == block[-1], axis=1).sum(1)[:-1]
        counts.append(len(prefix))
        converged.append(prefix)
        tokens.append(block[:-1][np.arange(block.shape[1]) >= prefix[:, None]])
    return np.array(counts), *(np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in (converged, tokens))


def decode_states(answer: np.ndarray, n: int, counts: np.ndarray, converged: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
    """Inverse of encode_states: per block [number of states, m], the fixed point last. Raises ValueError where the numbers do not fit."""
    sizes = np.minimum(n, len(answer) - n * np.arange(len(counts)))
    if len(counts) != -(-len(answer) // n) or counts.sum() != len(converged) or (np.repeat(sizes, counts) - converged).sum() != len(tokens):
        raise ValueError(f"{len(counts)} blocks with {len(converged)} states and {len(tokens)} tokens do not fit {len(answer)} answer tokens")
    blocks, state, token = [], 0, 0
    for i, (count, m) in enumerate(zip(counts, sizes, strict=True)):
        block = np.tile(answer[i * n : i * n + m], (count + 1, 1))
        open_ = np.zeros(block.shape, bool)
        open_[:-1] = np.arange(m) >= converged[state : state + count, None]
        size = int(open_.sum())
        block[open_] = tokens[token : token + size]
        blocks.append(block)
        state, token = state + count, token + size
    return blocks


def read_rows(path: Path) -> Iterator[TrajectoryRow]:
    """The trajectories of one part. Raises UserError naming the file, and the version where it is another."""
    table = read_table(path, TRAJECTORIES).combine_chunks()
    lists = {name: _flat(table[name]) for name in _LISTS}
    for row, (identity, stop_reason, n) in enumerate(zip(*(table[name].to_pylist() for name in ("id", "stop_reason", "block_size")), strict=True)):
        prompt, answer, *encoded = (flat[offsets[row] : offsets[row + 1]] for offsets, flat in lists.values())
        try:
            states = decode_states(answer, n, *encoded)
        except ValueError as error:
            raise UserError(f"{path}: prompt id {identity} is damaged ({error}); recompute the trajectories stage (force=[...])") from error
        yield TrajectoryRow(identity, prompt, answer, stop_reason, n, states)


def _flat(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    if column.num_chunks == 0:
        return np.zeros(1, np.int32), np.empty(0, np.int32)
    array = column.chunk(0)
    return array.offsets.to_numpy(), array.values.to_numpy()


def read_metadata(path: Path) -> dict[str, str]:
    """What write_trajectories was given; reads the footer only."""
    metadata = read_schema(path, TRAJECTORIES).metadata
    return {k.decode(): v.decode() for k, v in metadata.items() if k not in TRAJECTORIES.metadata}


def read_ids(path: Path) -> np.ndarray:
    """int64 [trajectories]."""
    return read_table(path, TRAJECTORIES, columns=["id"])["id"].to_numpy()


def read_trajectories(folder: Path) -> Iterator[Trajectory]:
    """All trajectories of a folder in the order of its parts; each id once."""
    import torch

    from jacobi_core.trajectories.record import Trajectory

    seen: set[int] = set()
    for path in trajectory_parts(folder):
        for row in read_rows(path):
            if row.id in seen:
                raise UserError(f"{path}: prompt id {row.id} stands in two parts; recompute the trajectories stage (force=[...])")
            seen.add(row.id)
            prompt, answer, *states = (torch.from_numpy(x.astype(np.int64)) for x in (row.prompt_ids, row.answer_ids, *row.states))
            yield Trajectory(row.id, prompt, answer, row.stop_reason, row.block_size, states)
