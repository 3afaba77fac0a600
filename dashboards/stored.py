"""Stage folders of a store as data frames: reads JSON and Parquet by their schema (docs/schemas.md), with nothing of the code that wrote them.

Raises Unreadable, one sentence for a person, where something is missing, damaged or of another version. Writes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from dashboards.paper_table import REFERENCES

VERSIONS = {"trajectories": "2", "packed": "2", "prompts": "1"}
_OURS = re.compile(r"[^@]+@\d+")  # "method@block_sizexBATCH" are batches
_NOT_DRAFTED = ("ar", *REFERENCES)
Text = Callable[[int], str]  # of one token id


class Unreadable(Exception):
    """What is missing and what to do, in one sentence."""


@dataclass(frozen=True)
class Stages:
    """The store: `<root>/<kind>-<fingerprint>/`, one folder per stage."""

    root: Path

    def named(self, kind: str) -> list[Path]:
        """The folders of one kind, the newest first; finished or still being written."""
        found = [path for path in self.root.glob(f"{kind}-*") if path.is_dir()] if self.root.is_dir() else []
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)

    def folder(self, fingerprint: str) -> Path:
        """Of a stage that is known by its fingerprint. Raises Unreadable where it is not there any more."""
        found = [path for path in self.root.glob(f"[!.]*-{fingerprint}") if path.is_dir()] if self.root.is_dir() else []
        if not found:
            raise Unreadable(f"{self.root} holds no stage {fingerprint}: it was deleted or lies in another store (set the store in the sidebar).")
        return found[0]

    def title(self, folder: Path) -> str:
        """What a person calls it: the stage it was first made for, and where."""
        try:
            made_for = read_json(folder / "manifest.json")["stage"]
        except Unreadable:
            made_for = "unfinished"
        return f"{made_for} ({folder.name})"

    def titled(self, folders: Sequence[Path]) -> dict[str, Path]:
        """The folders by what a person calls them."""
        return {self.title(folder): folder for folder in folders}

    def token_text(self, folder: Path) -> Text | None:
        """By the tokenizer of the prompts that a stage goes back to; None where it is not there."""
        try:
            upstream = read_json(folder / "manifest.json")["upstream"]
            while "prompts" not in upstream:
                upstream = read_json(self.folder(next(iter(upstream.values()))) / "manifest.json")["upstream"]
            file = self.folder(upstream["prompts"]) / "tokenizer" / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(file))
        except Exception:  # the library raises a bare one; ids are shown instead, and the page says so
            return None
        return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unreadable(f"{path} is not there: the stage is unfinished, or its files were deleted.") from None
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path} cannot be read ({error}).") from error


def open_parquet(path: Path, artifact: str) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise Unreadable(f"{path} is not there: the stage is unfinished, or its files were deleted.") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise Unreadable(f"{path} cannot be read ({error}).") from error
    metadata = file.schema_arrow.metadata or {}
    found, version = metadata.get(b"artifact", b"?").decode(), metadata.get(b"schema_version", b"?").decode()
    if (found, version) != (artifact, VERSIONS[artifact]):
        raise Unreadable(f"{path} holds {found} version {version}; this app reads {artifact} version {VERSIONS[artifact]}.")
    return file


# ---- trajectories


@dataclass(frozen=True)
class TrajectoryPart:
    """One part file. `rows` holds what is needed to choose: `id`, `answer_tokens`, `blocks`, `most_iterations`."""

    path: Path
    collect: str  # "all" states, or only the one that the "schedule" asked for
    table: pa.Table

    @classmethod
    def read(cls, path: Path) -> TrajectoryPart:
        file = open_parquet(path, "trajectories")
        return cls(path, (file.schema_arrow.metadata or {}).get(b"collect", b"all").decode(), file.read())

    @cached_property
    def rows(self) -> pd.DataFrame:
        columns = self.table.select(["id", "answer_ids", "block_states", "block_size", "stop_reason"]).to_pylist()
        return pd.DataFrame(
            {
                "id": [row["id"] for row in columns],
                "answer_tokens": [len(row["answer_ids"]) for row in columns],
                "blocks": [len(row["block_states"]) for row in columns],
                "most_iterations": [max(row["block_states"], default=0) for row in columns],
                "block_size": [row["block_size"] for row in columns],
                "stop_reason": [row["stop_reason"] for row in columns],
            }
        )

    def texts(self, row: int, text: Text | None) -> tuple[str, str]:
        """Prompt and answer."""
        stored = self.table.slice(row, 1).to_pylist()[0]
        return tuple("".join(f" {i}" if text is None else text(i) for i in stored[name]) for name in ("prompt_ids", "answer_ids"))

    def block(self, row: int, block: int, text: Text | None) -> pd.DataFrame:
        """The states of one block, the fixed point last: `iteration, position, id, text`. Without `text` the ids are shown."""
        stored = self.table.slice(row, 1).to_pylist()[0]
        counts, converged, tokens = stored["block_states"], stored["state_converged"], stored["state_tokens"]
        n = stored["block_size"]
        sizes = [min(n, len(stored["answer_ids"]) - n * i) for i in range(len(counts))]
        state, token = sum(counts[:block]), 0
        for i in range(block):
            before = sum(counts[:i])
            token += sum(sizes[i] - c for c in converged[before : before + counts[i]])
        fixed, states = stored["answer_ids"][block * n : (block + 1) * n], []
        for prefix in converged[state : state + counts[block]]:
            rest = tokens[token : token + len(fixed) - prefix]
            if prefix + len(rest) != len(fixed):
                raise Unreadable(f"{self.path}: the trajectory of prompt {stored['id']} is damaged.")
            states.append([*fixed[:prefix], *rest])
            token += len(rest)
        return pd.DataFrame(
            [
                {"iteration": i, "position": p, "id": token, "text": str(token) if text is None else text(token)}
                for i, ids in enumerate([*states, fixed])
                for p, token in enumerate(ids)
            ]
        )


# ---- packed rows


@dataclass(frozen=True)
class Packed:
    """`packed.parquet` of a pack stage, row by row."""

    file: pq.ParquetFile

    @classmethod
    def read(cls, folder: Path) -> Packed:
        return cls(open_parquet(folder / "packed.parquet", "packed"))

    @property
    def rows(self) -> int:
        return self.file.metadata.num_rows

    def tokens(self, row: int, text: Text | None) -> pd.DataFrame:
        """One row's tokens: `sample, kind, block, window, position, id, text, label, teacher`. Decodes one row group."""
        group, first = 0, 0
        while first + self.file.metadata.row_group(group).num_rows <= row:
            first += self.file.metadata.row_group(group).num_rows
            group += 1
        stored = self.file.read_row_group(group).slice(row - first, 1).to_pylist()[0]
        ids = stored["input_ids"]
        fields = {"position": "position_ids", "label": "labels"} | {name: name for name in ("sample", "kind", "block", "window", "teacher")}
        return pd.DataFrame(
            {name: stored[column] for name, column in fields.items()} | {"id": ids, "text": [f" {i}" if text is None else text(i) for i in ids]}
        )


# ---- prompts, training and evaluation


def prompts(folder: Path, split: str, most: int) -> list[str]:
    """What users say in the first `most` prompts of a split that are one message."""
    found: list[str] = []
    file = open_parquet(folder / "prompts.parquet", "prompts")
    for batch in file.iter_batches(batch_size=512, columns=["split", "messages"]):
        for row in batch.to_pylist():
            messages = json.loads(row["messages"])
            if row["split"] == split and [m["role"] for m in messages] == ["user"]:
                found.append(messages[0]["content"])
            if len(found) == most:
                return found
    return found


def training(folder: Path, model: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The logged steps and the probes of a distillation, each with its `model`."""
    stored = read_json(folder / "training.json")
    return tuple(pd.DataFrame(stored.get(key) or []).assign(model=model) for key in ("curves", "probes"))


def evaluation(folder: Path) -> dict[str, Any]:
    """The content of evaluation.json."""
    return read_json(folder / "evaluation.json")


def accepted_lengths(evaluation: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """Of our parallel decoders, one prompt at a time, per setting `method@block_size`: committed tokens per forward -> number of forwards."""
    stored = evaluation.get("accepted_lengths") or {}
    ours = {setting: counts for setting, counts in stored.items() if _OURS.fullmatch(setting) and setting.partition("@")[0] not in _NOT_DRAFTED}
    return {setting: {int(k): n for k, n in counts.items()} for setting, counts in ours.items()}


def changed(folder: str | Path) -> float:
    """When a folder last changed; 0 where there is none."""
    path = Path(folder)
    return path.stat().st_mtime if path.is_dir() else 0.0


def models(stages: Stages, kinds: Sequence[str] = ("export", "base")) -> list[Path]:
    """Checkpoint folders that can be decoded with, the newest export first."""
    return [folder for kind in kinds for folder in stages.named(kind) if (folder / "manifest.json").is_file()]
