"""Records that a tracking store could not take, in a file, in order, until it can. Knows nothing of MLflow or of what a record means.

One file per pipeline run, shared by all processes of it that see its folder. Whoever was cut off while sending sends the last
records once more: to send one twice must change nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pipelines.credentials import redacted

SUFFIX = ".jsonl"
METRICS = 1000  # points in one request that every MLflow store accepts
HEADER = ("tracking_uri", "experiment")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backlog:
    """Its first line says where the others go; a second file beside it says how far they were sent."""

    file: Path
    tracking_uri: str
    experiment: str

    @classmethod
    def read(cls, file: Path) -> Backlog:
        """One that a run left behind. Raises ValueError for a file that is none."""
        try:
            with file.open(encoding="utf-8") as lines:
                header = json.loads(lines.readline())
            return cls(file, **{name: header[name] for name in HEADER})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: not a backlog of tracking records") from error

    @property
    def _mark(self) -> Path:
        return self.file.with_suffix(".sent")

    def empty(self) -> bool:
        return not self.file.exists()

    def append(self, record: Mapping[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self._lock(".append"):
            new = not self.file.exists()
            try:
                with self.file.open("a", encoding="utf-8") as lines:
                    if new:
                        lines.write(json.dumps({name: redacted(getattr(self, name)) for name in HEADER}) + "\n")
                    # The newline in front keeps a line that a kill cut short from spoiling this one.
                    lines.write("\n" + json.dumps(record) + "\n")
            except OSError:
                if new:  # a full disk: half a header would hide all that follows
                    self.file.unlink(missing_ok=True)
                raise

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """One sender at a time per folder; False where another process is sending now."""
        lock = self._lock(".send")
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def send_all(self, send: Callable[[dict[str, Any]], None]) -> int:
        """Calls `send` with every record in order, also those that arrive meanwhile, and removes the file; returns how many there were.

        Call it in one's `turn`. What `send` raises propagates, and that record is the first of the next call. Points of one run that
        follow each other are handed over together.
        """
        sent = 0
        while not self.empty():
            for position, count, record in self._unsent():
                send(record)
                self._reached(position)
                sent += count
            with self._lock(".append"):
                if self._sent() >= self.file.stat().st_size:
                    self._mark.unlink(missing_ok=True)  # first: a file without mark is sent again, a mark without file would skip records
                    self.file.unlink()
        return sent

    def waiting(self) -> int:
        return 0 if self.empty() else sum(count for _, count, _ in self._unsent())

    def _unsent(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(position in the file behind it, records, the record)."""
        held: tuple[int, int, dict[str, Any]] | None = None
        for position, record in self._lines():
            if held and _joinable(held[2], record):
                held[2]["metrics"].extend(record["metrics"])
                held = (position, held[1] + 1, held[2])
                continue
            if held:
                yield held
            held = (position, 1, record)
        if held:
            yield held

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        start = self._sent()
        with self.file.open("rb") as lines:
            if start == 0:
                lines.readline()  # the header
            lines.seek(max(start, lines.tell()))
            while (line := lines.readline()).endswith(b"\n"):
                if line.strip():
                    try:
                        yield lines.tell(), json.loads(line)
                    except ValueError:
                        log.warning("%s: a record that was cut short is lost", self.file)

    def _sent(self) -> int:
        try:
            return int(self._mark.read_text())
        except (OSError, ValueError):
            return 0

    def _reached(self, position: int) -> None:
        scratch = self._mark.with_suffix(".tmp")
        scratch.write_text(str(position))
        scratch.replace(self._mark)

    def _lock(self, name: str) -> FileLock:
        return FileLock(self.file.parent / f"{name}.lock")


def _joinable(first: dict[str, Any], second: dict[str, Any]) -> bool:
    same = first["write"] == second["write"] == "log_metrics" and first["run"] == second["run"]
    return same and len(first["metrics"]) + len(second["metrics"]) <= METRICS
