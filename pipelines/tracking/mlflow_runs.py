"""The MLflow tracking store: reaching it, its experiment, and runs whose process died. Imports mlflow lazily; `mlflow_writes` records.

Every call names its run id (no fluent API, no active run).
"""

from __future__ import annotations

import functools
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from filelock import FileLock

from pipelines.credentials import redacted
from pipelines.process import is_gone

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# Read by mlflow when it is imported. Nothing is sent anywhere; an unreachable server is given up after seconds, not minutes.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}.items():
    os.environ.setdefault(_name, _value)

PARENT = "mlflow.parentRunId"
HANDLE = "handle"  # tag of every run: its name before the store has given it an id, so that creating it twice makes one
PENDING = "pending-"  # what the id of a run begins with that the store does not know yet; the rest is its handle
LOCKED_FOR = 60.0  # seconds to wait for a database that other processes write to

# Of MlflowException: the store has answered, and asking again would not change the answer.
REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST", "INVALID_STATE"}

T = TypeVar("T")
log = logging.getLogger(__name__)


class Away(Exception):
    """The tracking store cannot be reached now."""


class Untold(Exception):
    """The tracking store has not been told of this run yet."""


def sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).expanduser().resolve() if uri.startswith("sqlite:///") else None


def absolute(uri: str) -> str:
    database = sqlite_path(uri)
    return uri if database is None else f"sqlite:///{database}"


def check_reachable(uri: str) -> None:
    """Raises Away without the long wait of a request that nobody answers. A database file is not made: opening it elsewhere would."""
    database, address = sqlite_path(uri), urlsplit(uri)
    if database is not None and not database.exists():
        raise Away(f"no tracking database {database} here")
    if address.scheme in ("http", "https"):
        port = address.port or (443 if address.scheme == "https" else 80)
        if _proxied():
            return
        try:
            socket.create_connection((address.hostname or "", port), timeout=3).close()
        except OSError as error:
            raise Away(f"{address.hostname}:{port} does not answer: {error.strerror or error}") from error


def _proxied() -> bool:
    return any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"))


@functools.cache
def connect(tracking_uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it logs every failed statement at length; we say it in a line
    return MlflowClient(tracking_uri)


@dataclass(frozen=True)
class Connection:
    """A tracking store and the experiment in it that all our runs belong to. Hashable: what is known of it is kept per process."""

    tracking_uri: str  # absolute
    experiment: str

    @property
    def client(self) -> MlflowClient:
        return connect(self.tracking_uri)

    @property
    def experiment_id(self) -> str:
        return _experiment(self)

    def run_id(self, run: str) -> str:
        """The store's id of a run that may have been made while the store was away. Raises Untold until it has been told of it."""
        return _told(self, run) if run.startswith(PENDING) else run

    def find(self, handle: str) -> Run | None:
        found = self.client.search_runs([self.experiment_id], f"tags.`{HANDLE}` = '{handle}'", max_results=1)
        return found[0] if found else None

    def open(self, *, before_reaping: Callable[[], None]) -> None:
        """Makes the database, once however many processes start together, and the experiment; ends the runs of dead processes.

        `before_reaping` is called in between: what those runs still had to say about their end comes first.
        """
        database = sqlite_path(self.tracking_uri)
        _experiment.cache_clear()  # another may have been deleted, or the database, since this process last looked
        if database is None:
            check_reachable(self.tracking_uri)
        else:
            database.parent.mkdir(parents=True, exist_ok=True)
        # Two processes that migrate an empty sqlite database, or create one experiment, at the same time break each other.
        with nullcontext() if database is None else FileLock(f"{database}.lock"):
            patiently(lambda: self.experiment_id)
            before_reaping()
            patiently(lambda: reap(self))


@functools.cache
def _experiment(connection: Connection) -> str:
    from mlflow.exceptions import MlflowException

    client, name = connection.client, connection.experiment
    found = client.get_experiment_by_name(name)
    if found is None:
        database = sqlite_path(connection.tracking_uri)
        try:
            return client.create_experiment(name, artifact_location=None if database is None else (database.parent / "artifacts").as_uri())
        except MlflowException:
            found = client.get_experiment_by_name(name)  # on a server, which has no lock of ours, another process may have been first
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise ValueError("it was deleted; restore it or choose another name")
    return found.experiment_id


@functools.cache
def _told(connection: Connection, run: str) -> str:
    found = connection.find(run.removeprefix(PENDING))
    if found is None:
        raise Untold(f"the tracking store does not know run {run}")
    return found.info.run_id


def reap(connection: Connection) -> None:
    """Ends the runs of processes that died without doing so (SIGKILL, power). Sweeps come last: their state follows from their jobs."""
    client, experiment_id = connection.client, connection.experiment_id
    gone = [run for run in _found(client, experiment_id, "attributes.status = 'RUNNING'") if is_gone(run.data.tags)]
    for run in sorted(gone, key=lambda run: run.data.tags.get("kind") == "sweep"):
        if client.get_run(run.info.run_id).info.status != "RUNNING":
            continue  # its process ended it properly between the search and the look for the process
        if run.data.tags.get("kind") == "sweep":
            settle_sweep(client, experiment_id, run.info.run_id)
        else:
            client.set_tag(run.info.run_id, "error", f"process {run.data.tags['process.pid']} died")
            client.set_terminated(run.info.run_id, "KILLED")


def _found(client: MlflowClient, experiment_id: str, wanted: str) -> Iterator[Run]:
    """All of them: one answer of a store holds 1000 at most."""
    token = None
    while True:
        page = client.search_runs([experiment_id], wanted, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def settle_sweep(client: MlflowClient, experiment_id: str, sweep_id: str) -> None:
    """No job knows whether it is the last, so each sets the state: RUNNING while one runs, else FAILED if any did not finish."""
    states = {run.info.status for run in _found(client, experiment_id, f"tags.`{PARENT}` = '{sweep_id}'")}
    if "RUNNING" not in states:
        client.set_terminated(sweep_id, "FINISHED" if states <= {"FINISHED"} else "FAILED")


def patiently(call: Callable[[], T]) -> T:
    """`call`, again while a database that others write to is locked. It must be one that may be done twice."""
    deadline = time.monotonic() + LOCKED_FOR
    while True:
        try:
            return call()
        except Exception as error:
            if "database is locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(random.uniform(0.05, 0.5))


def refused(error: Exception) -> bool:
    """Whether the store, or our own side, has said no for good; anything else may pass."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code in REFUSALS
    return isinstance(error, ValueError | TypeError | KeyError | FileNotFoundError | IsADirectoryError) and "requests" not in type(error).__module__


def first_line(error: BaseException) -> str:
    return redacted((str(error).strip() or type(error).__name__).splitlines()[0])


@contextmanager
def said(what: str) -> Iterator[None]:
    """Nothing in here may cost more than a warning."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, first_line(error))
