"""The one reader and writer of every stage's files; their schemas, with versions, are described in docs/schemas.md.

Knows nothing about what stages do. Files appear whole or not at all: written under a temporary name, then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.stage import UserError

if TYPE_CHECKING:
    from jacobi_core.distillation.packing import PackedRow
    from jacobi_core.trajectories.record import Trajectory

SCHEMA_VERSION = 1
_INTS = pa.list_(pa.int32())


def _schema(name: str, fields: list[tuple[str, pa.DataType]]) -> pa.Schema:
    return pa.schema(fields, metadata={"artifact": name, "schema_version": str(SCHEMA_VERSION)})


PROMPTS = _schema("prompts", [("id", pa.int64()), ("split", pa.string()), ("messages", pa.string()), ("input_ids", _INTS), ("meta", pa.string())])
TRAJECTORIES = _schema(
    "trajectories",
    [
        ("id", pa.int64()),
        ("prompt_ids", _INTS),
        ("answer_ids", _INTS),
        ("stop_reason", pa.string()),
        ("block_size", pa.int32()),
        ("states", _INTS),
        ("state_offsets", _INTS),
    ],
)
PACKED_FIELDS = ("input_ids", "position_ids", "sample", "kind", "block", "window", "labels", "teacher")
PACKED = _schema("packed", [*((name, _INTS) for name in PACKED_FIELDS), ("consistency_tokens", pa.int32()), ("ar_tokens", pa.int32())])


# ---- plain files


def write_text(path: Path, text: str) -> None:
    """Atomic and durable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False))


def read_json(path: Path) -> Any:
    """Raises UserError naming the file where it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not there, no JSON, or no UTF-8
        raise UserError(f"{path}: not a readable JSON file ({error})") from error


def _write_table(path: Path, table: pa.Table) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(table, temporary, compression="zstd")
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def _read_table(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from error
    found = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    name = schema.metadata[b"artifact"].decode()
    if found.get("artifact") != name or found.get("schema_version") != str(SCHEMA_VERSION):
        raise UserError(f"{path}: holds {found.get('artifact')} version {found.get('schema_version')}, expected {name} version {SCHEMA_VERSION}")
    return table


# ---- prompts


@dataclass(frozen=True)
class Prompt:
    """messages: chat messages as transformers takes them; input_ids: the templated prompt; meta: what scoring needs."""

    id: int
    split: str
    messages: list[dict[str, str]]
    input_ids: list[int]
    meta: dict[str, Any]


def prompt_id(messages: Sequence[dict[str, str]]) -> int:
    """First 63 bits of sha256 of the messages (canonical JSON): the same prompt has the same id everywhere."""
    digest = hashlib.sha256(json.dumps(list(messages), sort_keys=True, ensure_ascii=False).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def write_prompts(folder: Path, prompts: Sequence[Prompt]) -> None:
    rows = [{**asdict(p), "messages": json.dumps(p.messages, ensure_ascii=False), "meta": json.dumps(p.meta, ensure_ascii=False)} for p in prompts]
    _write_table(folder / "prompts.parquet", pa.Table.from_pylist(rows, schema=PROMPTS))


def read_prompts(folder: Path, split: str) -> list[Prompt]:
    """The prompts of one split, in their stored order."""
    rows = _read_table(folder / "prompts.parquet", PROMPTS).to_pylist()
    return [Prompt(**{**r, "messages": json.loads(r["messages"]), "meta": json.loads(r["meta"])}) for r in rows if r["split"] == split]


# ---- trajectories: one part per shard of prompts


def trajectory_part(folder: Path, shard: int) -> Path:
    return folder / f"part-{shard:06d}.parquet"


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    from jacobi_core.trajectories.record import flatten_states

    rows = []
    for t in trajectories:
        flat, offsets = flatten_states(t.states)
        rows.append(
            {
                "id": t.id,
                "prompt_ids": t.prompt_ids.tolist(),
                "answer_ids": t.answer_ids.tolist(),
                "stop_reason": t.stop_reason,
                "block_size": t.block_size,
                "states": flat,
                "state_offsets": offsets,
            }
        )
    _write_table(path, pa.Table.from_pylist(rows, schema=TRAJECTORIES))


def read_trajectories(folder: Path) -> Iterator[Trajectory]:
    """All trajectories of a folder in the order of its parts; each id once."""
    import torch

    from jacobi_core.trajectories.record import Trajectory, unflatten_states

    seen: set[int] = set()
    for path in sorted(folder.glob("part-*.parquet")):
        for r in _read_table(path, TRAJECTORIES).to_pylist():
            if r["id"] in seen:
                raise UserError(f"{path}: prompt id {r['id']} stands in two parts; recompute the trajectories stage (force=[...])")
            seen.add(r["id"])
            flat = torch.tensor(r["states"], dtype=torch.long)
            states = unflatten_states(flat, r["state_offsets"], answer_length=len(r["answer_ids"]), block_size=r["block_size"])
            prompt, answer = torch.tensor(r["prompt_ids"]), torch.tensor(r["answer_ids"])
            yield Trajectory(r["id"], prompt, answer, r["stop_reason"], r["block_size"], states)


# ---- packed rows


def write_packed(path: Path, rows: Iterable[PackedRow]) -> None:
    from jacobi_core.distillation.losses import loss_counts

    records = []
    for row in rows:
        consistency, ar = loss_counts(row).tolist()
        records.append({**{n: getattr(row, n).tolist() for n in PACKED_FIELDS}, "consistency_tokens": consistency, "ar_tokens": ar})
    _write_table(path, pa.Table.from_pylist(records, schema=PACKED))


class PackedRows:
    """Random access to the packed rows of a file, by row number."""

    def __init__(self, path: Path) -> None:
        table = _read_table(path, PACKED).combine_chunks()
        self._offsets = table["input_ids"].chunk(0).offsets.to_numpy()
        self._values = {name: table[name].chunk(0).values.to_numpy() for name in PACKED_FIELDS}
        self.lengths = self._offsets[1:] - self._offsets[:-1]  # tokens per row
        self.consistency_tokens = table["consistency_tokens"].to_numpy()
        self.ar_tokens = table["ar_tokens"].to_numpy()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> PackedRow:
        import torch

        from jacobi_core.distillation.packing import PackedRow

        start, stop = self._offsets[index], self._offsets[index + 1]
        return PackedRow(**{name: torch.as_tensor(values[start:stop].copy(), dtype=torch.long) for name, values in self._values.items()})
