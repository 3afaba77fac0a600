"""From a record to the tracking store, now or when it is back: what cannot be sent waits in a file (`backlog`), and that is said once.

Nothing in here raises, and nothing waits long for a store that does not answer: training goes on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.credentials import redacted, redacted_values, restored
from pipelines.tracking import mlflow_runs as runs
from pipelines.tracking import mlflow_writes
from pipelines.tracking.backlog import SUFFIX, Backlog
from pipelines.tracking.mlflow_runs import PENDING, Connection

PAUSES = (5.0, 60.0)  # seconds between two attempts at a store that is away: the first, and at most, doubling in between
TRIES = 3  # of a record that a store in good health fails on, before it is given up

log = logging.getLogger(__name__)


@dataclass
class _Outage:
    """What this process knows of a store that is away."""

    since: float  # monotonic
    pause: float = PAUSES[0]
    until: float = 0.0  # no attempt before


_outages: dict[str, _Outage] = {}  # by tracking URI
_tries: Counter[str] = Counter()
_warned: set[tuple[str, str]] = set()  # (run, kind of record)


@dataclass(frozen=True)
class Channel:
    """To the tracking store, for the records of one pipeline run. Picklable: works in every process that sees the backlog's folder."""

    tracking_uri: str  # absolute
    experiment: str
    file: Path  # of the backlog

    @property
    def store(self) -> Connection:
        return Connection(self.tracking_uri, self.experiment)

    @property
    def backlog(self) -> Backlog:
        return Backlog(self.file, self.tracking_uri, self.experiment)

    def create_run(self, *, handle: str, name: str, tags: dict[str, str]) -> str:
        """The run's id; a pending one where the store is away."""
        sent = self.send("create_run", handle=handle, name=name, tags=tags, started=int(time.time() * 1000))
        return sent or PENDING + handle

    def send(self, write: str, **fields: Any) -> Any:
        """A record, behind those that wait. What its function in `mlflow_writes` returns; None where it waits or was refused."""
        record = {"write": write, **(fields if write == "log_metrics" else redacted_values(fields))}
        if self.backlog.empty() and not self._pausing():
            try:
                runs.check_reachable(self.tracking_uri)
                return mlflow_writes.send(self.store, record, first=True)
            except Exception as error:
                if runs.refused(error):
                    self._given_up(record, error)
                    return None
                if not isinstance(error, runs.Untold):
                    self._away(error)
        try:
            self.backlog.append(record)
        except OSError as error:
            self._given_up(record, error)
            return None
        self.deliver()
        return None

    def deliver(self, *, now: bool = False) -> bool:
        """Sends what waits, unless the last attempt was a moment ago (`now`: even then). Whether nothing waits any more."""
        if self.backlog.empty():
            return True
        if self._pausing() and not now:
            return False
        with self.backlog.turn() as ours:
            if not ours:
                return False
            try:
                runs.check_reachable(self.tracking_uri)
                sent = self.backlog.send_all(self._resend)
            except Exception as error:
                self._away(error)
                return False
        outage = _outages.pop(self.tracking_uri, None)
        if sent:
            away = f" after {time.monotonic() - outage.since:.0f} s" if outage else ""
            log.warning("tracking store %s is back%s: %d waiting records were sent", redacted(self.tracking_uri), away, sent)
        return True

    def close(self, patience: float) -> bool:
        """At the end of a run: waits for a store that is away; then says how the rest gets there. Whether nothing is left."""
        deadline = time.monotonic() + patience
        while not self.deliver(now=True):
            if time.monotonic() > deadline:
                log.warning(
                    "%d records of this run wait in %s; the next run sends them, or: python -m pipelines.tracking replay=%s",
                    self.backlog.waiting(),
                    self.file,
                    self.file.parent,
                )
                return False
            time.sleep(min(1.0, max(0.05, deadline - time.monotonic())))
        return True

    def _resend(self, record: dict[str, Any]) -> None:
        """One that waited. Given up where the store refuses it, or is well and fails on it again and again."""
        try:
            mlflow_writes.send(self.store, record)
        except Exception as error:
            if not runs.refused(error):
                key = repr(record)[:1000]
                _tries[key] += self._well()
                if _tries[key] < TRIES:
                    raise
            self._given_up(record, error)

    def _well(self) -> bool:
        try:
            return self.store.client.get_experiment_by_name(self.experiment) is not None
        except Exception:
            return False

    def _pausing(self) -> bool:
        outage = _outages.get(self.tracking_uri)
        return outage is not None and time.monotonic() < outage.until

    def _away(self, error: Exception) -> None:
        outage = _outages.get(self.tracking_uri)
        if outage is None:
            outage = _outages[self.tracking_uri] = _Outage(since=time.monotonic())
            shown = redacted(self.tracking_uri)
            log.warning("tracking store %s is away (%s): the run goes on, its records wait in %s", shown, runs.first_line(error), self.file)
        outage.until = time.monotonic() + outage.pause
        outage.pause = min(2 * outage.pause, PAUSES[1])

    def _given_up(self, record: dict[str, Any], error: Exception) -> None:
        kind = (str(record.get("run", record.get("name"))), record["write"])
        if kind not in _warned:
            _warned.add(kind)
            log.warning("not recorded in MLflow (%s of run %s): %s", kind[1], kind[0], runs.first_line(error))


def left_behind(folder: Path, tracking_uri: str | None = None) -> Iterator[Channel]:
    """The backlogs of a folder, oldest first. tracking_uri: with credentials, which no backlog keeps."""
    for file in sorted(folder.glob(f"*{SUFFIX}"), key=_age):
        with runs.said(str(file)):
            backlog = Backlog.read(file)
            yield Channel(restored(backlog.tracking_uri, tracking_uri), backlog.experiment, file)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
