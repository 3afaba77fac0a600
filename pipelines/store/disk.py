"""The store on a disk, NFS included: stage folders, their manifests, who computes what. The base of the store on object storage.

A stage's folder is `<root>/<kind>-<fingerprint>`. Its `manifest.json`, written last, is the only sign that it is finished, and it
lists every file with its size and sha256, so an output that was cut short, half deleted or changed is recomputed. Kind, not id,
is part of the name: two rounds, two runs or two jobs of a sweep that ask for the same work share one folder.

Beside the stages: `.claims` (who computes what), `.uses` (which run needs what), `.checked` (large files that were hashed: see `files`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipelines.store import claim as claims
from pipelines.store import files
from pipelines.store.files import Damaged
from pipelines.store.manifest import MANIFEST, Manifest
from tasks.stage import UserError

STAGE_FOLDER = re.compile(r"(?P<kind>[^.].*)-(?P<fingerprint>[0-9a-f]{16})")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One stage's folder as it lies in a store, or what an interrupted deletion or upload has left of one."""

    name: str  # of the folder; of a left-over, its path below the store
    state: str  # "finished", "computing", "damaged", "unfinished" or "left over"
    manifest: Manifest | None  # of a finished or damaged one
    size: int  # bytes
    age: float  # seconds since it was last written, by the store's own clock

    @property
    def kind(self) -> str:
        match = STAGE_FOLDER.fullmatch(self.name)
        return match["kind"] if match else ""


class Store:
    """All stage folders of one or many runs. Several processes, on several machines, may share a root."""

    def __init__(self, root: Path, *, setting: str = "paths.store") -> None:
        """Creates `root`. Raises UserError, naming `setting`, when nothing can be written there."""
        self.root = Path(root).expanduser().resolve()
        self._held: dict[str, claims.Claim] = {}  # fingerprint -> claim of this object
        self._warned: set[Path] = set()
        try:
            for name in (".claims", ".uses", ".checked"):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.root).close()
        except OSError as error:
            raise UserError(f"{setting}={root}: cannot write there ({error.strerror}); choose a writable folder") from error

    def folder(self, kind: str, fingerprint: str) -> Path:
        """Where the stage works, and where its output can be read once it is finished and fetched."""
        return self.root / f"{kind.replace('/', '-')}-{fingerprint}"

    def finished(self, folder: Path) -> Manifest | None:
        """The manifest of an intact output; None when it is absent or unreadable, or a listed file is missing or not what was written.

        Cheap: sizes of all files, hashes of small ones and of those that were touched since they were last hashed (`verify` reads all).
        """
        manifest = Manifest.read(folder)
        if manifest is None:
            return None
        wrong = self.damage(folder, manifest)
        if wrong and folder not in self._warned:
            self._warned.add(folder)
            log.warning("%s: %s; it counts as not there", folder.name, wrong)
        return None if wrong else manifest

    def damage(self, folder: Path, manifest: Manifest, *, full: bool = False) -> str | None:
        """What is wrong with a local output, in words. full: every byte is read."""
        known = self._stamps(folder)
        wrong, stamps = files.damage(folder, manifest, known=None if full else known)
        if wrong and full:
            self._checked(folder).unlink(missing_ok=True)  # what it said is not so: `finished` must look again
        if stamps and any(known.get(name) != found for name, found in stamps.items()):
            self._remember(folder, {**known, **stamps})
        return wrong

    def glance(self, folder: Path) -> str | None:
        """What is wrong with a finished output, as far as it shows without reading all of it: as `finished`, but with the reason."""
        manifest = Manifest.read(folder)
        return None if manifest is None else self.damage(folder, manifest)

    def verify(self, folder: Path) -> str | None:
        """What is wrong with a finished output, every byte of it read; None for a whole one and for one that was never finished."""
        manifest = Manifest.read(folder)
        return None if manifest is None else self.damage(folder, manifest, full=True)

    def fetch(self, folder: Path) -> None:
        """Makes a finished output readable at `folder`: here it is. Raises Damaged where it is not what its manifest says."""
        if self.finished(folder) is None:
            raise Damaged(f"{folder.name} is gone from the store, or damaged")

    def address(self, folder: Path, manifest: Manifest) -> str:
        """URI under which a finished output lies in the store, for those who come later."""
        return folder.as_uri()

    @contextmanager
    def claim(self, fingerprint: str) -> Iterator[None]:
        """One process at a time per fingerprint, on all machines that share the disk. Says whom it waits for. See `claim`."""
        held = claims.acquire(self.root / ".claims" / fingerprint)
        self._held[fingerprint] = held
        try:
            yield
        finally:
            self._held.pop(fingerprint)
            held.release()

    def salvage(self, folder: Path) -> Manifest | None:
        """A result that was computed here and did not reach the store: nothing on a disk. Call it under the claim, before `prepare`."""
        return None

    def prepare(self, folder: Path, *, resume: bool) -> None:
        """Makes `folder` ready for a stage to run in: empty, or with `resume` as an interrupted attempt left it.

        A folder with a manifest was finished once and is damaged or unwanted now: never resumed. Call it under the claim.
        """
        if folder.exists() and not (resume and not (folder / MANIFEST).exists()):
            self._wipe(folder)
        folder.mkdir(exist_ok=True)

    def commit(self, folder: Path, manifest: Manifest) -> Manifest:
        """Declares `folder` finished and returns the manifest with its files. All of them reach the disk before the manifest does.

        Raises claim.ClaimLost where this process held the claim and another has taken over.
        """
        found = files.output_files(folder)
        for path in found.values():
            files.sync(path)
        digests = dict(zip(found, files.each(files.sha256, found.values()), strict=True))
        sizes = {name: path.stat().st_size for name, path in found.items()}
        self._remember(folder, {name: files.stamp(path, digests[name]) for name, path in found.items() if sizes[name] > files.SMALL})
        manifest = dataclasses.replace(manifest, files=sizes, hashes=digests)
        held = self._held.get(manifest.fingerprint)
        if held:
            held.confirm()
        self._write_manifest(folder, manifest)
        self._warned.discard(folder)
        return manifest

    def _write_manifest(self, folder: Path, manifest: Manifest) -> None:
        files.write_whole(folder / MANIFEST, manifest.to_json(), scratch=folder / f"{MANIFEST}.tmp")

    def _wipe(self, folder: Path) -> None:
        """Renamed first, so that a kill during the deletion cannot leave half a folder to be resumed.

        What cannot be deleted now (NFS keeps a file that is being read on another machine) is for the next time, or `prune`.
        """
        folder.rename(folder.with_name(f".wiped-{folder.name}-{secrets.token_hex(4)}"))
        self._checked(folder).unlink(missing_ok=True)
        for condemned in self.root.glob(f".wiped-{folder.name}*"):
            shutil.rmtree(condemned, ignore_errors=True)

    def _checked(self, folder: Path) -> Path:
        return self.root / ".checked" / f"{folder.name}.json"

    def _stamps(self, folder: Path) -> files.Stamps:
        try:
            stamps = json.loads(self._checked(folder).read_text())
        except (OSError, ValueError):
            return {}
        return stamps if isinstance(stamps, dict) else {}

    def _remember(self, folder: Path, stamps: files.Stamps) -> None:
        if not stamps:
            return
        try:
            files.write_whole(self._checked(folder), json.dumps(stamps))
        except OSError as error:  # hashed again next time
            log.debug("%s: not remembered (%s)", folder.name, error)

    # What lies there: for the tool and `prune`.

    def entries(self) -> list[Entry]:
        """All that lies in the store, by name."""
        now, found = self.now(), []
        for folder in sorted(self.root.iterdir()):
            match = STAGE_FOLDER.fullmatch(folder.name)
            left_over = folder.name.startswith((".wiped-", ".fetching-"))
            if not folder.is_dir() or not (match or left_over):
                continue
            manifest, state = None, "left over"
            if match:
                manifest = Manifest.read(folder)
                state = "unfinished" if manifest is None else "damaged" if self.damage(folder, manifest) else "finished"
                if state != "finished" and self.is_claimed(match["fingerprint"]):
                    state = "computing"
            try:
                size, written = _extent(folder)
            except FileNotFoundError:  # a run, or another prune, has just taken it away
                continue
            found.append(Entry(folder.name, state, manifest, size, now - written))
        return found

    def is_claimed(self, fingerprint: str) -> bool:
        place = self.root / ".claims" / fingerprint
        return place.is_dir() and claims.is_held(place)

    def remove(self, entry: Entry) -> bool:
        """Deletes it; False where a run is at work in it, or has just taken it away."""
        match = STAGE_FOLDER.fullmatch(entry.name)
        if match is None:
            shutil.rmtree(self.root / entry.name, ignore_errors=True)
            return True
        held = claims.acquire(self.root / ".claims" / match["fingerprint"], wait=False)
        if held is None:
            return False
        try:
            self._wipe(self.root / entry.name)
        except FileNotFoundError:
            return False
        finally:
            held.release()
        return True

    # Notes: small texts that runs leave for each other beside the stages. `uses` keeps its records in them.

    def write_note(self, name: str, text: str) -> None:
        files.write_whole(self.root / ".uses" / name, text)

    def drop_note(self, name: str) -> None:
        (self.root / ".uses" / name).unlink(missing_ok=True)

    def notes(self) -> dict[str, tuple[str, float]]:
        """Name -> text and seconds since it was last written, by the clock of the disk it lies on."""
        folder, found = self.root / ".uses", {}
        now = self.now()
        for path in sorted(folder.glob("*.json")):
            if path.name.startswith("."):
                continue
            try:
                found[path.name] = (path.read_text(encoding="utf-8"), now - path.stat().st_mtime)
            except OSError:  # its run has just removed it
                continue
        return found

    def now(self) -> float:
        """The time by the clock that stamps the files of this store: a file server's need not be ours."""
        try:
            with tempfile.NamedTemporaryFile(dir=self.root / ".uses") as probe:
                return Path(probe.name).stat().st_mtime
        except OSError:  # a store that may only be read
            return time.time()


def _extent(folder: Path) -> tuple[int, float]:
    """Bytes of its files, and when the last of them was written."""
    size, written = 0, folder.stat().st_mtime
    for path in folder.rglob("*"):
        with suppress(OSError):
            found = path.lstat()
            size, written = size + (found.st_size if path.is_file() else 0), max(written, found.st_mtime)
    return size, written
