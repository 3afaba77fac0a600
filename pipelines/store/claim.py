"""One run at a time per fingerprint, on any disk that several machines share: claims with a heartbeat, by exclusive creation alone.

The claim on a fingerprint is a folder of numbered files; **the highest number counts**. Taking it is creating the next number with
O_EXCL, which one process alone can do, on NFS too (version 3 and newer): no file lock, which NFS may lack or keep after its owner's
death. `7` is held, `7.free` was given back. Nobody renames or removes another's highest file, so a slow process cannot undo what
a faster one did: its number exists already, or is no longer the highest, and it starts over.

The holder touches its file every BEAT seconds. Whoever waits takes over a claim whose process is gone, at once where it ran on this
machine, else when the file has not changed for EXPIRY seconds *of the waiting process's own watching*: no two machines' clocks
are compared. A holder that was taken for dead (a suspended machine) is stopped when it wakes, and can no longer commit.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from pipelines.process import identity, is_gone

BEAT = 10.0  # seconds between two signs of life
EXPIRY = 180.0  # seconds without one after which a claim from another machine is void; NFS may show a change 60 seconds late
POLL = 0.5  # seconds between two looks of one who waits
LONGEST_LOOK = 5.0  # of the time between two looks, no more counts: whoever was asleep itself has not watched

NUMBER = re.compile(r"(\d+)(\.free)?")

log = logging.getLogger(__name__)


class ClaimLost(Exception):
    """Another process took over while this one gave no sign of life: what it has computed must not be committed."""


class Claim:
    """A held claim and the thread that keeps it. Made by `acquire`."""

    def __init__(self, place: Path, number: int) -> None:
        self._place, self._number = place, number
        self._ended = threading.Event()
        self._changing = threading.Lock()  # `confirm` changes the number that the thread beats for
        self._thread = threading.Thread(target=self._beat, name=f"claim {place.name}", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Raises ClaimLost where another process has taken over. Call it right before what must be done by the holder alone.

        It takes the next number itself, which fails exactly where another has it, whatever a cached directory says.
        """
        with self._changing:
            if not _take(self._place, self._number + 1):
                raise ClaimLost(self._lost())
            self._number += 1

    def release(self) -> None:
        self._ended.set()
        self._thread.join()
        own = self._place / str(self._number)
        try:
            own.rename(f"{own}.free")
        except OSError:
            log.debug("%s was no longer there to be given back", own)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with self._changing:
                try:
                    os.utime(self._place / str(self._number))
                    lost = _highest(self._place)[0] > self._number
                except OSError as error:  # a disk that is away for a while; `confirm` decides whether the claim is still ours
                    log.debug("no sign of life for %s: %s", self._place.name, error)
                    continue
            if lost and not self._ended.is_set():
                log.error("%s; this run stops, and the same command reuses that result", self._lost())
                _stop_this_run()
                return

    def _lost(self) -> str:
        return (
            f"{self._place.name}: this process gave no sign of life for too long, and {_who(_owner(self._place, _highest(self._place)[0]))} took over"
        )


def acquire(place: Path, *, wait: bool = True) -> Claim | None:
    """The claim whose files lie in the folder `place` (its name is the fingerprint). With `wait=False`, None where it is held."""
    place.mkdir(parents=True, exist_ok=True)
    watch, told = _Watch(place, 0), ""
    while True:
        number, free = _highest(place)
        if not free:
            if watch.number != number:
                watch = _Watch(place, number)
            ended = watch.ended()
            if not ended:
                if not wait:
                    return None
                owner = _owner(place, number)
                if owner and told != owner.get("token"):  # the same holder may have gone on to another number
                    told = owner.get("token", "")
                    log.info("%s: %s is computing it; waiting for its result", place.name, _who(owner))
                time.sleep(POLL)
                continue
            log.info("%s: %s %s; taking over", place.name, _who(_owner(place, number)), ended)
        if _take(place, number + 1):
            return Claim(place, number + 1)


def is_held(place: Path) -> bool:
    """Whether a claim is held, as far as one look can tell: a process of this machine that is gone holds none."""
    number, free = _highest(place)
    return not free and not _Watch(place, number).ended()


class _Watch:
    """One who waits, looking at one number."""

    def __init__(self, place: Path, number: int) -> None:
        self.number = number
        self._file = place / str(number)
        self._seen: int | None = None
        self._looked = time.monotonic()
        self._unchanged = 0.0

    def ended(self) -> str | None:
        """Why the holder counts as dead; None while it does not."""
        owner = _owner(self._file.parent, self.number)
        if owner and owner.get("boot") == boot() and owner.get("process.host") == identity()["process.host"]:
            return "has ended" if is_gone(owner) else None
        now = time.monotonic()
        try:
            mtime = self._file.stat().st_mtime_ns
        except OSError:
            mtime = None
        if mtime is None or mtime != self._seen:
            self._seen, self._unchanged = mtime, 0.0
        else:
            self._unchanged += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        return f"gave no sign of life for {EXPIRY:.0f} s" if self._unchanged >= EXPIRY else None


def boot() -> str:
    """Which start of which machine this is: host names and process ids are not unique among machines that share a disk."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def me() -> dict[str, str]:
    """Who this process is, for others to read."""
    return {**identity(), "boot": boot(), "since": datetime.now(UTC).isoformat(timespec="seconds")}


def _take(place: Path, number: int) -> bool:
    """Creates `number`; False where it exists, or a higher one does."""
    own = place / str(number)
    try:
        descriptor = os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, json.dumps({**me(), "token": TOKEN}).encode())
        os.fsync(descriptor)
    except OSError:  # a full disk: leave nothing that others would wait for
        own.unlink()
        raise
    finally:
        os.close(descriptor)
    names = os.listdir(place)
    if any(found >= number for name, found in _numbered(names) if name != own.name):
        own.unlink(missing_ok=True)
        return False
    for name, _ in _numbered(names):
        if name != own.name:
            (place / name).unlink(missing_ok=True)
    return True


TOKEN = uuid.uuid4().hex  # this process, for those who were told that it computes


def _highest(place: Path) -> tuple[int, bool]:
    """The number that counts and whether it is free; (0, True) where nobody ever claimed."""
    names = _numbered(os.listdir(place))
    return max(((number, name.endswith(".free")) for name, number in names), default=(0, True))


def _numbered(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, int(match[1])) for name in names if (match := NUMBER.fullmatch(name))]


def _owner(place: Path, number: int) -> Mapping[str, str]:
    """Empty while it is being written, or gone."""
    try:
        owner = json.loads((place / str(number)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _who(owner: Mapping[str, str]) -> str:
    if not owner:
        return "another run"
    host = owner.get("process.host", "?").split()[0]
    return f"process {owner.get('process.pid', '?')} on {host} (since {owner.get('since', '?')})"


def _stop_this_run() -> None:
    """As if someone had ended it: its workers go, MLflow hears of it. It works in a folder that is another's now."""
    os.kill(os.getpid(), signal.SIGTERM)
