"""What names a piece of work (its fingerprint) and what a finished one says about itself (its manifest)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1  # fields with a default may be added under the same number: a reader ignores those that it does not know


@dataclass(frozen=True)
class Manifest:
    """What a finished stage says about itself."""

    stage: str  # id of the stage that computed it first; others with the same fingerprint reuse it
    kind: str
    version: int
    fingerprint: str
    config: Mapping[str, Any]
    upstream: Mapping[str, str]  # input name -> fingerprint
    external: Mapping[str, Any]
    metrics: Mapping[str, float]
    started: str  # ISO 8601, UTC
    seconds: float
    mlflow_run_id: str | None
    git_sha: str | None
    files: Mapping[str, int] = field(default_factory=dict)  # path below the folder -> bytes; filled in by `Store.commit`
    hashes: Mapping[str, str] = field(default_factory=dict)  # the same paths -> sha256; empty in manifests written before there were any
    gpus: bool = False  # whether its workers had GPUs; False too in manifests written before that was noted
    place: str | None = None  # on object storage, the folder below the stage's that holds the files
    schema_version: int = MANIFEST_SCHEMA

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest | None:
        """None where `text` is no manifest of a schema known here."""
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            values = json.loads(text)
            manifest = cls(**{name: value for name, value in values.items() if name in known})
        except (ValueError, TypeError, AttributeError):
            return None
        parts = (manifest.files, manifest.hashes, manifest.upstream, manifest.config)
        return manifest if manifest.schema_version == MANIFEST_SCHEMA and all(isinstance(part, dict) for part in parts) else None

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`; None where there is none or it is unreadable."""
        try:
            return cls.from_json((folder / MANIFEST).read_bytes())
        except OSError:
            return None


def plain(value: Any) -> Any:
    """A config as JSON types. A dataclass field with `metadata={"fingerprint": False}` (a path, a log interval) is left out.

    Anything else that has no one JSON form, a `Path` above all, is a TypeError: what a path points at belongs in `external`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.metadata.get("fingerprint", True)}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be part of a fingerprint")


def fingerprint(*, stage: str, version: int, config: Mapping, upstream: Mapping[str, str], external: Mapping) -> str:
    """16 hex digits that name one piece of work: equal for equal work, whatever the key order, machine or cluster size.

    `stage` is the kind ("distill"), `upstream` maps input name -> fingerprint, `external` holds the identity of inputs no stage made.
    """
    work = {"stage": stage, "version": version, "config": config, "upstream": upstream, "external": external}
    text = json.dumps(plain(work), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def git_sha() -> str | None:
    """Commit of this checkout, with "-dirty" when files differ from it; None outside a repository."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
