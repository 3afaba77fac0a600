"""The files of one stage's folder: listing, hashing, checking them against a manifest. Knows nothing of stores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pipelines.store.manifest import MANIFEST, Manifest

SMALL = 2**20  # bytes; a file up to this size is hashed whenever it is looked at, a larger one when it has changed since
THREADS = 4  # hashing and syncing let go of the interpreter

T = TypeVar("T")
R = TypeVar("R")
Stamps = dict[str, list]  # path below a folder -> [sha256, bytes, mtime in ns] of a file that was hashed and found whole


class Damaged(Exception):
    """An output that its manifest calls finished is not what was written. One line: which, and what is wrong with it."""


def output_files(folder: Path) -> dict[str, Path]:
    """Path below `folder` -> file, sorted, without the manifest and what is left of writing one."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in found.items() if name not in (MANIFEST, f"{MANIFEST}.tmp")}


def each(work: Callable[[T], R], items: Iterable[T], *, threads: int = THREADS) -> list[R]:
    """`work` on every item, several at a time, in order. The first exception propagates and what has not begun is left out."""
    pool = ThreadPoolExecutor(threads)
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(cancel_futures=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str, *, scratch: Path | None = None) -> None:
    """Appears whole or not at all, also after a power cut."""
    scratch = scratch or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    sync(scratch)
    scratch.replace(path)
    sync(path.parent)


def stamp(path: Path, digest: str) -> list:
    found = path.stat()
    return [digest, found.st_size, found.st_mtime_ns]


def damage(folder: Path, manifest: Manifest, *, known: Mapping[str, list] | None) -> tuple[str | None, Stamps]:
    """What differs from the manifest, in words (None: nothing), and the stamps of the files that were hashed and are whole.

    known: stamps from an earlier time: a large file that still has the stamp is not read again. None: every file is read.
    A file without a hash in the manifest is checked by its size alone.
    """
    to_hash = []
    for name, size in manifest.files.items():
        try:
            found = (folder / name).stat()
        except OSError:
            return f"{name} is missing", {}
        if found.st_size != size:
            return f"{name} has {found.st_size:,} bytes instead of {size:,}", {}
        wanted = manifest.hashes.get(name)
        trusted = known is not None and size > SMALL and known.get(name) == [wanted, size, found.st_mtime_ns]
        if wanted is not None and not trusted:
            to_hash.append(name)
    stamps: Stamps = {}
    try:
        digests = each(lambda name: sha256(folder / name), to_hash)
    except OSError as error:  # a bad disk, or a deletion meanwhile
        return f"{error.filename or 'a file'} cannot be read ({error.strerror})", {}
    for name, digest in zip(to_hash, digests, strict=True):
        if digest != manifest.hashes[name]:
            return f"{name} has other content than was written (sha256 differs)", {}
        if manifest.files[name] > SMALL:
            stamps[name] = stamp(folder / name, digest)
    return None, stamps
