"""The one reader and writer of every stage's files; their schemas, with versions, are described in docs/schemas.md.

Knows nothing about what stages do. Files appear whole or not at all: written under a temporary name, then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.stage import UserError

_INTS = pa.list_(pa.int32())


def schema_of(name: str, fields: list[tuple[str, pa.DataType]], *, version: int = 1) -> pa.Schema:
    return pa.schema(fields, metadata={"artifact": name, "schema_version": str(version)})


PROMPTS = schema_of("prompts", [("id", pa.int64()), ("split", pa.string()), ("messages", pa.string()), ("input_ids", _INTS), ("meta", pa.string())])


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


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Where to write it: a temporary name, which becomes `path`, atomic and durable, unless the writer fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_table(path: Path, table: pa.Table, *, level: int | None = None) -> None:
    """Atomic and durable; what a failed attempt wrote is removed. level: of zstd."""
    with new_file(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=level)


def open_table(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    """Nothing but the footer is read. Raises UserError naming the file where it is not readable, or holds another artifact or version."""
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from error
    _check_artifact(path, file.schema_arrow, schema)
    return file


def read_table(path: Path, schema: pa.Schema, *, columns: list[str] | None = None) -> pa.Table:
    """All columns by default. Raises UserError as open_table does."""
    file = open_table(path, schema)
    try:
        return file.read(columns=columns)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from error


def read_schema(path: Path, schema: pa.Schema) -> pa.Schema:
    """What a file says about itself, its own metadata included. Raises UserError as open_table does."""
    return open_table(path, schema).schema_arrow


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
    with (
        new_file(folder / "prompts.parquet") as temporary,
        pq.ParquetWriter(temporary, PROMPTS.with_metadata(metadata), compression="zstd") as writer,
    ):
        while group := list(islice(rows, PROMPT_ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema=writer.schema))


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
        self._file = open_table(self._path, PROMPTS)
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
