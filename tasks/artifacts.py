"""The one reader and writer of every stage's files; their schemas, with versions, are described in docs/schemas.md.

Knows nothing about what stages do. Files appear whole or not at all: written under a temporary name, then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.stage import UserError

if TYPE_CHECKING:
    from jacobi_core.distillation.packing import PackedRow

_INTS = pa.list_(pa.int32())


def schema_of(name: str, fields: list[tuple[str, pa.DataType]], *, version: int = 1) -> pa.Schema:
    return pa.schema(fields, metadata={"artifact": name, "schema_version": str(version)})


PROMPTS = schema_of("prompts", [("id", pa.int64()), ("split", pa.string()), ("messages", pa.string()), ("input_ids", _INTS), ("meta", pa.string())])
PACKED_FIELDS = ("input_ids", "position_ids", "sample", "kind", "block", "window", "labels", "teacher")
PACKED = schema_of("packed", [*((name, _INTS) for name in PACKED_FIELDS), ("consistency_tokens", pa.int32()), ("ar_tokens", pa.int32())])


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


def write_table(path: Path, table: pa.Table, *, level: int | None = None) -> None:
    """Atomic and durable; what a failed attempt wrote is removed. level: of zstd."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd", compression_level=level)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from error


def read_table(path: Path, schema: pa.Schema, *, columns: list[str] | None = None) -> pa.Table:
    """All columns by default. Raises UserError naming the file where it is not readable, or holds another artifact or version than `schema`."""
    file = _opened(path)
    _check_artifact(path, file.schema_arrow, schema)
    try:
        return file.read(columns=columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from error


def read_schema(path: Path, schema: pa.Schema) -> pa.Schema:
    """What a file says about itself, its own metadata included. Raises as read_table does."""
    found = _opened(path).schema_arrow
    _check_artifact(path, found, schema)
    return found


def _check_artifact(path: Path, found: pa.Schema, schema: pa.Schema) -> None:
    metadata = {k.decode(): v.decode() for k, v in (found.metadata or {}).items()}
    name, version = (schema.metadata[key].decode() for key in (b"artifact", b"schema_version"))
    if metadata.get("artifact") != name or metadata.get("schema_version") != version:
        raise UserError(f"{path}: holds {metadata.get('artifact')} version {metadata.get('schema_version')}, expected {name} version {version}")


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


PROMPT_ROW_GROUP = 512  # rows that a reader of single prompts decodes at once


def write_prompts(folder: Path, prompts: Iterable[Prompt], *, template_sha256: str | None = None) -> None:
    """In the given order; holds no more than one row group. template_sha256: of the chat template, kept in the schema's metadata."""
    metadata = {**(PROMPTS.metadata or {}), **({b"chat_template_sha256": template_sha256.encode()} if template_sha256 else {})}
    rows = ({**vars(p), "messages": json.dumps(p.messages, ensure_ascii=False), "meta": json.dumps(p.meta, ensure_ascii=False)} for p in prompts)
    path = folder / "prompts.parquet"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pq.ParquetWriter(temporary, PROMPTS.with_metadata(metadata), compression="zstd") as writer:
            while group := list(islice(rows, PROMPT_ROW_GROUP)):
                writer.write_table(pa.Table.from_pylist(group, schema=writer.schema))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def read_prompts(folder: Path, split: str) -> list[Prompt]:
    """The prompts of one split, in their stored order: for splits that fit in memory, PromptRows for the others."""
    rows = PromptRows(folder, split)
    return rows.read(range(len(rows)))


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(**{**row, "messages": json.loads(row["messages"]), "meta": json.loads(row["meta"])})


class PromptRows:
    """The ids of one split's prompts, in their stored order, and the prompts themselves on demand."""

    def __init__(self, folder: Path, split: str) -> None:
        self._path = folder / "prompts.parquet"
        self._file = _opened(self._path)
        _check_artifact(self._path, self._file.schema_arrow, PROMPTS)
        ids, groups, rows = ([np.empty(0, kind)] for kind in (np.int64, np.int32, np.int32))
        for group in range(self._file.num_row_groups):
            table = self._read_group(group, ["id", "split"])
            found = np.flatnonzero(pc.equal(table["split"], split).to_numpy())
            ids.append(table["id"].to_numpy()[found])
            groups.append(np.full(len(found), group, np.int32))
            rows.append(found.astype(np.int32))
        self.ids = np.concatenate(ids)  # int64 [prompts]
        self._groups, self._rows = np.concatenate(groups), np.concatenate(rows)  # where each prompt stands in the file

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, positions: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions of the split, in the order asked for. Decodes only the row groups they stand in."""
        found: dict[int, Prompt] = {}
        for group, same_group in groupby(sorted(positions), key=lambda position: self._groups[position]):
            wanted = list(same_group)
            rows = self._read_group(int(group), None).take(self._rows[wanted]).to_pylist()
            found |= {position: _prompt(row) for position, row in zip(wanted, rows, strict=True)}
        return [found[position] for position in positions]

    def _read_group(self, group: int, columns: list[str] | None) -> pa.Table:
        try:
            return self._file.read_row_group(group, columns=columns)
        except (OSError, pa.ArrowInvalid) as error:
            raise UserError(f"{self._path}: not a readable Parquet file ({error})") from error


# ---- packed rows


def write_packed(path: Path, rows: Iterable[PackedRow]) -> None:
    from jacobi_core.distillation.losses import loss_counts

    records = []
    for row in rows:
        consistency, ar = loss_counts(row).tolist()
        records.append({**{n: getattr(row, n).tolist() for n in PACKED_FIELDS}, "consistency_tokens": consistency, "ar_tokens": ar})
    write_table(path, pa.Table.from_pylist(records, schema=PACKED))


class PackedRows:
    """Random access to the packed rows of a file, by row number."""

    def __init__(self, path: Path) -> None:
        table = read_table(path, PACKED).combine_chunks()
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
