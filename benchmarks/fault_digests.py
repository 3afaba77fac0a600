"""What of a store must be the same however often its making was disturbed: a hash per finished stage, over everything but times. No Ray, no torch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.store import MANIFEST
from tasks.artifacts import read_json
from tasks.trajectory_files import read_ids, trajectory_parts

TIMES = ("seconds", "prefill_seconds")  # columns
RESULTS = ("model", "benchmark", "method", "block_size", "batch_size", "prompts", "tokens", "forwards", "accuracy", "equals_ar", "train_tokens")


def digests(store: Path) -> dict[str, str]:
    """Folder name (kind and fingerprint) -> hash of its rows, weights, tokenizer and results. Finished stages only."""
    found = {}
    for manifest in sorted(store.glob(f"*/{MANIFEST}")):
        folder, content = manifest.parent, hashlib.sha256()
        for name in sorted(read_json(manifest)["files"]):
            content.update(_content(folder / name))
        found[folder.name] = content.hexdigest()
    return found


def trajectory_ids(store: Path) -> dict[str, list[int]]:
    """Folder name -> prompt ids of its trajectories, sorted; an id that was collected twice stands twice. Finished stages only."""
    folders = [manifest.parent for manifest in sorted(store.glob(f"trajectories-*/{MANIFEST}"))]
    return {folder.name: sorted(int(i) for part in trajectory_parts(folder) for i in read_ids(part)) for folder in folders}


def lost_and_doubled(ids: dict[str, list[int]], expected: dict[str, list[int]]) -> tuple[int, int]:
    """Trajectories of the undisturbed run that are not there, and trajectories beyond the first of a prompt."""
    lost = sum((Counter(wanted) - Counter(ids.get(name, ()))).total() for name, wanted in expected.items())
    return lost, sum(len(found) - len(set(found)) for found in ids.values())


def _content(path: Path) -> bytes:
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        table = table.drop_columns([name for name in TIMES if name in table.column_names]).replace_schema_metadata(None)
        return path.name.encode() + _table(table)
    if path.suffix == ".safetensors" or path.name == "tokenizer.json":
        return path.name.encode() + path.read_bytes()
    if path.name == "results.json":
        rows = [{key: row[key] for key in RESULTS} for row in read_json(path)["rows"]]
        return json.dumps(rows, sort_keys=True).encode()
    return b""  # the rest tells of times, machines and places, or repeats what is hashed


def _table(table: pa.Table) -> bytes:
    rows: list[dict[str, Any]] = table.to_pylist()
    return "\n".join(json.dumps(row, sort_keys=True, default=str) for row in rows).encode()
