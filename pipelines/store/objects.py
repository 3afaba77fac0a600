"""The store on object storage. Stages work in a folder of this machine's disk (`paths.work`); what is finished is uploaded.

    <base>/<kind>-<fingerprint>/<place>/...          the files of one attempt; its place is a name that no other attempt has
    <base>/<kind>-<fingerprint>/manifest.json        written last: which place counts

There is no lock: two machines may compute the same stage, each writes a place of its own, and the manifest that is written last counts;
stages are deterministic, so either will do. An upload that was cut short has no manifest and is taken by nobody; `prune` removes it.
Runs that share a work folder do wait for each other there. See `disk` for that folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from pyarrow.fs import FileInfo, FileSelector, FileSystem, FileType
from pyarrow.lib import ArrowException

from pipelines.store import files
from pipelines.store.disk import STAGE_FOLDER, Entry, Store
from pipelines.store.files import Damaged
from pipelines.store.manifest import MANIFEST, Manifest
from pipelines.store.uri import explained
from tasks.stage import UserError

CHUNK = 8 * 2**20
TRANSFERS = 8  # files on their way at once
ATTEMPTS = 2  # to read an output: another run may put a new manifest, and a prune take the old objects, while one reads
USES, PROBE = ".uses", ".uses/.clock"
WITHOUT_FOLDERS = ("s3", "gcs", "abfs")  # filesystems on which a path needs no folder to be made first

log = logging.getLogger(__name__)


class ObjectStore(Store):
    """shown: setting and URI as errors name them. query: of the URI (endpoint, region), without its question mark; it holds no credentials."""

    def __init__(self, filesystem: FileSystem, base: str, *, work: Path, shown: str, query: str = "") -> None:
        super().__init__(work, setting="paths.work")
        self.filesystem, self.base, self._shown, self._query = filesystem, base, shown, query

    def check(self, *, read_only: bool) -> None:
        """Raises UserError where the bucket is not there or may not be used: before hours of work, not after."""
        with self._said():
            there = self.filesystem.get_file_info(FileSelector(self.base, allow_not_found=True))
            if not read_only:
                self._put(PROBE, b"")
            elif not there and self.filesystem.get_file_info(self.base.split("/")[0]).type == FileType.NotFound:
                raise FileNotFoundError("bucket does not exist")

    def finished(self, folder: Path) -> Manifest | None:
        """Asks for the manifest object and the sizes of what it lists; downloads no file."""
        manifest, wrong = self._looked_at(folder)
        if wrong and folder not in self._warned:
            self._warned.add(folder)
            log.warning("%s: %s; it counts as not there", folder.name, wrong)
        return None if wrong else manifest

    def glance(self, folder: Path) -> str | None:
        return self._looked_at(folder)[1]

    def _looked_at(self, folder: Path) -> tuple[Manifest | None, str | None]:
        """The manifest, and what is wrong by the sizes of what it lists."""
        with self._said():
            manifest = self.manifest(folder.name)
            if manifest is None:
                return None, None
            sizes = {name: info.size for name, info in self._listing(f"{folder.name}/{manifest.place}").items()}
        wrong = next((name for name, size in manifest.files.items() if sizes.get(name) != size), None)
        return manifest, None if wrong is None else f"{wrong} is missing from the store or has another size"

    def manifest(self, name: str) -> Manifest | None:
        """What `<name>/manifest.json` says; None where it is not there or unreadable."""
        try:
            with self.filesystem.open_input_stream(self._path(f"{name}/{MANIFEST}")) as stream:
                manifest = Manifest.from_json(stream.read())
        except FileNotFoundError:
            return None
        return manifest if manifest and manifest.place else None

    def verify(self, folder: Path) -> str | None:
        """Reads every byte of the objects, keeping none; a damaged output is no longer finished afterwards."""
        with self._said():
            manifest = self.manifest(folder.name)
            if manifest is None:
                return None
            try:
                files.each(lambda name: self._download(folder.name, manifest, name, None), manifest.files, threads=TRANSFERS)
            except Damaged as damaged:
                self.withdraw(folder.name)
                return str(damaged)
        return None

    def fetch(self, folder: Path) -> None:
        """Downloads a finished output to `folder` unless it is there already. Every byte is checked against the manifest.

        Raises Damaged, having withdrawn the manifest, where the objects are not what was written: the stage must run again.
        """
        for attempt in range(1, ATTEMPTS + 1):
            manifest = self.finished(folder)
            if manifest is None:
                raise Damaged(f"{folder.name} is gone from the store, or damaged")
            if self._is_here(folder, manifest):
                return
            try:
                self._bring(folder, manifest)
                return
            except Damaged:
                if attempt == ATTEMPTS:
                    self.withdraw(folder.name)
                    raise

    def _bring(self, folder: Path, manifest: Manifest) -> None:
        scratch = self.root / f".fetching-{folder.name}-{secrets.token_hex(4)}"
        scratch.mkdir()
        try:
            with self._said():
                files.each(lambda name: self._download(folder.name, manifest, name, scratch), manifest.files, threads=TRANSFERS)
            self._write_manifest(scratch, manifest)
            with self.claim(manifest.fingerprint):  # a run of this machine may be at work in the folder
                if not self._is_here(folder, manifest):
                    if folder.exists():
                        self._wipe(folder)
                    scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def address(self, folder: Path, manifest: Manifest) -> str:
        query = f"?{self._query}" if self._query else ""
        return f"{self._shown.partition('=')[2].rstrip('/')}/{folder.name}/{manifest.place}{query}"

    def salvage(self, folder: Path) -> Manifest | None:
        """Uploads a result that is whole in the work folder and not in the store: its upload failed, or the objects were lost."""
        manifest = Manifest.read(folder)
        if manifest is None or self.damage(folder, manifest, full=True):
            return None
        log.info("%s: computed before and not in the store; uploading it", folder.name)
        return self._upload(folder, manifest)

    def commit(self, folder: Path, manifest: Manifest) -> Manifest:
        """As on a disk, in the work folder; then uploads it. Raises UserError where that fails: the result is kept, `salvage` finds it."""
        return self._upload(folder, super().commit(folder, dataclasses.replace(manifest, place=None)))

    def withdraw(self, name: str) -> None:
        """Its output is no longer finished, whoever was first to say so; what it leaves is for `prune`."""
        with self._said(), suppress(FileNotFoundError):
            self.filesystem.delete_file(self._path(f"{name}/{MANIFEST}"))

    def _upload(self, folder: Path, manifest: Manifest) -> Manifest:
        place = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
        manifest = dataclasses.replace(manifest, place=place)
        try:
            files.each(lambda name: self._put(f"{folder.name}/{place}/{name}", folder / name), manifest.files, threads=TRANSFERS)
            there = {name: info.size for name, info in self._listing(f"{folder.name}/{place}").items()}
            if there != dict(manifest.files):
                raise OSError("what arrived is not what was sent")
            self._put(f"{folder.name}/{MANIFEST}", manifest.to_json().encode())
        except (OSError, ArrowException) as error:
            why = explained(error)
            raise UserError(f"{self._shown}: upload failed: {why}. The result is kept in {folder}; the same command uploads it") from error
        self._write_manifest(folder, manifest)
        self._warned.discard(folder)
        return manifest

    def _is_here(self, folder: Path, manifest: Manifest) -> bool:
        local = Manifest.read(folder)
        return local is not None and (local.files, local.hashes) == (manifest.files, manifest.hashes) and self.damage(folder, local) is None

    def _download(self, name: str, manifest: Manifest, file: str, target: Path | None) -> None:
        """One file into `target`, or nowhere; raises Damaged where it is not what the manifest says."""
        digest, size = hashlib.sha256(), 0
        path = None if target is None else target / file
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            source = self._path(f"{name}/{manifest.place}/{file}")
            with self.filesystem.open_input_stream(source) as stream, path.open("wb") if path else nullcontext() as copy:
                while chunk := stream.read(CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    if copy:
                        copy.write(chunk)
        except FileNotFoundError as error:
            raise Damaged(f"{name}: {file} is missing from the store") from error
        if size != manifest.files[file] or digest.hexdigest() != manifest.hashes.get(file, digest.hexdigest()):
            raise Damaged(f"{name}: {file} in the store has other content than was written")

    def _put(self, name: str, content: bytes | Path) -> None:
        path = self._path(name)
        if self.filesystem.type_name not in WITHOUT_FOLDERS:
            self.filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        with self.filesystem.open_output_stream(path) as stream:
            if isinstance(content, bytes):
                stream.write(content)
                return
            with content.open("rb") as file:
                while chunk := file.read(CHUNK):
                    stream.write(chunk)

    def _listing(self, name: str) -> dict[str, FileInfo]:
        """Path below `name` -> its object."""
        prefix = self._path(name).rstrip("/") + "/"
        infos = self.filesystem.get_file_info(FileSelector(prefix.rstrip("/"), recursive=True, allow_not_found=True))
        return {info.path.lstrip("/")[len(prefix.lstrip("/")) :]: info for info in infos if info.type == FileType.File}

    def _path(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base

    @contextmanager
    def _said(self) -> Iterator[None]:
        """An object store that fails is the user's to mend: one line."""
        try:
            yield
        except (OSError, ArrowException) as error:
            raise UserError(f"{self._shown}: {explained(error)}") from error

    # What lies there.

    def entries(self) -> list[Entry]:
        """The store's own; of the work folder, only what interrupted downloads and deletions have left."""
        with self._said():
            now, places = self.now(), {}
            for path, info in self._listing("").items():
                name, _, below = path.partition("/")
                if STAGE_FOLDER.fullmatch(name) and below:
                    places.setdefault(name, {}).setdefault(below.partition("/")[0], {})[below] = info
            found = [entry for name, there in sorted(places.items()) for entry in self._entries_of(name, there, now)]
        return found + [entry for entry in super().entries() if entry.state == "left over"]

    def _entries_of(self, name: str, places: dict[str, dict[str, FileInfo]], now: float) -> Iterator[Entry]:
        """places: name below the stage's folder -> path below that folder -> object."""
        manifest = self.manifest(name) if MANIFEST in places else None
        for place, objects in places.items():
            size, age = sum(info.size for info in objects.values()), now - max(map(_written, objects.values()))
            if manifest is None or place not in (MANIFEST, manifest.place):
                yield Entry(f"{name}/{place}", "left over", None, size, age)
        if manifest is not None:
            objects = places.get(manifest.place, {})
            there = {path.partition("/")[2]: info.size for path, info in objects.items()}
            state = "finished" if all(there.get(file) == size for file, size in manifest.files.items()) else "damaged"
            written = max(map(_written, [*objects.values(), places[MANIFEST][MANIFEST]]))
            yield Entry(name, state, manifest, sum(there.values()), now - written)

    def remove(self, entry: Entry) -> bool:
        """The manifest first, so that nobody follows it to what is being deleted. A reader on its way asks again, and computes."""
        if entry.name.startswith("."):
            return super().remove(entry)
        if entry.manifest is not None:
            self.withdraw(entry.name)
            entry = dataclasses.replace(entry, name=f"{entry.name}/{entry.manifest.place}")
        path = self._path(entry.name)
        with self._said(), suppress(FileNotFoundError):  # another prune was faster
            if self.filesystem.get_file_info(path).type == FileType.File:
                self.filesystem.delete_file(path)
            else:
                self.filesystem.delete_dir(path)
        return True

    # Notes: see `disk`.

    def write_note(self, name: str, text: str) -> None:
        self._put(f"{USES}/{name}", text.encode())

    def drop_note(self, name: str) -> None:
        with self._said(), suppress(FileNotFoundError):
            self.filesystem.delete_file(self._path(f"{USES}/{name}"))

    def notes(self) -> dict[str, tuple[str, float]]:
        found, now = {}, self.now()
        with self._said():
            for name, info in sorted(self._listing(USES).items()):
                if name.endswith(".json"):
                    with suppress(FileNotFoundError), self.filesystem.open_input_stream(info.path) as stream:  # a prune may just have removed it
                        found[name] = (stream.read().decode(errors="replace"), now - _written(info))
        return found

    def now(self) -> float:
        try:
            self._put(PROBE, b"")
            return _written(self.filesystem.get_file_info(self._path(PROBE)))
        except OSError:  # a store that may only be read
            return time.time()


def _written(info: FileInfo) -> float:
    """When, in seconds since 1970; now where the filesystem does not tell, as some of fsspec do not: nothing there is ever old."""
    return time.time() if info.mtime_ns is None else info.mtime_ns / 1e9
