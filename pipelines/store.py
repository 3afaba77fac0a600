"""Where finished stages live on disk: fingerprint, folder, manifest, lock. Knows neither the order of stages nor MLflow.

A stage's folder is `<root>/<kind>-<fingerprint>`. Its `manifest.json`, written last, is the only sign that it is finished, and it
lists every file with its size, so an output that was cut short or half deleted is recomputed. Kind, not id, is part of the
name: two rounds, two runs or two jobs of a sweep that ask for the same work share one folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tasks.stage import UserError

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1

log = logging.getLogger(__name__)


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
    schema_version: int = MANIFEST_SCHEMA


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


class Store:
    """All stage folders of one or many runs. Several processes may share a root."""

    def __init__(self, root: Path) -> None:
        """Creates `root`. Raises UserError when nothing can be written there."""
        self.root = Path(root).expanduser().resolve()
        self._locks = self.root / ".locks"
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.root).close()
        except OSError as error:
            raise UserError(f"paths.store={root}: cannot write there ({error.strerror}); choose a writable folder") from error

    def folder(self, kind: str, fingerprint: str) -> Path:
        return self.root / f"{kind.replace('/', '-')}-{fingerprint}"

    def finished(self, folder: Path) -> Manifest | None:
        """The manifest of an intact output; None when it is absent, unreadable, or a listed file is missing or has another size."""
        try:
            manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
            intact = all((folder / name).stat().st_size == size for name, size in manifest.files.items())
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return manifest if intact and manifest.schema_version == MANIFEST_SCHEMA else None

    @contextmanager
    def lock(self, fingerprint: str) -> Iterator[None]:
        """One process at a time per fingerprint. The operating system lets go of it when the holder dies, however it dies."""
        lock = FileLock(self._locks / f"{fingerprint}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("another run is computing %s; waiting for its result", fingerprint)
            lock.acquire(poll_interval=0.2)
        try:
            yield
        finally:
            lock.release()

    def prepare(self, folder: Path, *, resume: bool) -> None:
        """Makes `folder` ready for a stage to run in: empty, or with `resume` as an interrupted attempt left it.

        A folder with a manifest was finished once and is damaged or unwanted now: never resumed. Call it under the lock.
        """
        if folder.exists() and not (resume and not (folder / MANIFEST).exists()):
            # Renamed first, so that a kill during the deletion cannot leave half a folder to be resumed.
            condemned = folder.with_name(f".wiped-{folder.name}")
            shutil.rmtree(condemned, ignore_errors=True)
            folder.rename(condemned)
            shutil.rmtree(condemned)
        folder.mkdir(exist_ok=True)

    def commit(self, folder: Path, manifest: Manifest) -> Manifest:
        """Declares `folder` finished and returns the manifest with its files. All of them reach the disk before the manifest does."""
        files = {}
        scratch = folder / f"{MANIFEST}.tmp"
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path not in (scratch, folder / MANIFEST):
                _sync(path)
                files[path.relative_to(folder).as_posix()] = path.stat().st_size
        manifest = dataclasses.replace(manifest, files=files)
        scratch.write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n", encoding="utf-8")
        _sync(scratch)
        scratch.replace(folder / MANIFEST)
        _sync(folder)
        return manifest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
