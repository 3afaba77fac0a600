"""Calls to the MLflow tracking store: open it, start and end a run, write to it. The only module that imports mlflow, and lazily.

Used by `tracking`, which decides what is recorded. Every call names its run id (no fluent API, no active run).
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from pipelines.process import identity, is_gone
from pipelines.store import git_sha
from tasks.stage import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Read by mlflow when it is imported. Nothing is sent anywhere; an unreachable server is given up after seconds, not minutes.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}.items():
    os.environ.setdefault(_name, _value)

PARENT = "mlflow.parentRunId"
PARAM_LENGTH = 500  # characters; the full config is an artifact
PARAM_COUNT = 500
BATCH = 100  # params per request that every MLflow store accepts

log = logging.getLogger(__name__)


def sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).expanduser().resolve() if uri.startswith("sqlite:///") else None


def absolute(uri: str) -> str:
    database = sqlite_path(uri)
    return uri if database is None else f"sqlite:///{database}"


@functools.cache
def connect(tracking_uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri)


def open_experiment(uri: str, experiment: str) -> tuple[MlflowClient, str]:
    """A client and the experiment's id. Creates the database, once however many processes start together, and ends stale runs."""
    database = sqlite_path(uri)
    try:
        if database is not None:
            database.parent.mkdir(parents=True, exist_ok=True)
        # Two processes that migrate an empty sqlite database, or create one experiment, at the same time break each other.
        with nullcontext() if database is None else FileLock(f"{database}.lock"):
            client = connect(uri)
            experiment_id = _experiment(client, experiment, None if database is None else (database.parent / "artifacts").as_uri())
            _reap(client, experiment_id)
    except Exception as error:
        raise UserError(f"paths.tracking_uri={uri}: cannot open experiment {experiment!r}: {first_line(error)}") from error
    return client, experiment_id


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=artifacts)
        except MlflowException:
            found = client.get_experiment_by_name(name)  # on a server, which has no lock of ours, another process may have been first
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise ValueError("it was deleted; restore it or choose another name")
    return found.experiment_id


def _reap(client: MlflowClient, experiment_id: str) -> None:
    """Ends the runs of processes that died without doing so (SIGKILL, power). Sweeps come last: their state follows from their jobs."""
    gone = [run for run in client.search_runs([experiment_id], "attributes.status = 'RUNNING'") if is_gone(run.data.tags)]
    for run in sorted(gone, key=lambda run: run.data.tags.get("kind") == "sweep"):
        if client.get_run(run.info.run_id).info.status != "RUNNING":
            continue  # its process ended it properly between the search and the look for the process
        if run.data.tags.get("kind") == "sweep":
            settle_sweep(client, experiment_id, run.info.run_id)
        else:
            client.set_tag(run.info.run_id, "error", f"process {run.data.tags['process.pid']} died")
            client.set_terminated(run.info.run_id, "KILLED")


def create_run(client: MlflowClient, experiment_id: str, name: str, tags: Mapping[str, str]) -> str:
    sha = git_sha()
    commit = {"mlflow.source.git.commit": sha} if sha else {}
    return client.create_run(experiment_id, run_name=name, tags={**tags, **commit, **identity()}).info.run_id


@contextmanager
def ended(client: MlflowClient, run_id: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | SystemExit)  # Ray turns SIGTERM into its own SystemExit
        quietly(client.set_terminated, run_id, "KILLED" if killed else "FAILED")
        quietly(client.set_tag, run_id, "error", f"{type(error).__name__}: {first_line(error)}"[:PARAM_LENGTH])
        if not killed:
            quietly(client.log_text, run_id, traceback.format_exc(), "traceback.txt")
        raise
    quietly(client.set_terminated, run_id, "FINISHED")


def log_params(client: MlflowClient, run_id: str, config: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    flat = list(flatten(config).items())
    if len(flat) > PARAM_COUNT:
        log.warning("run %s: only the first %d of %d params are logged; config.yaml has all", run_id, PARAM_COUNT, len(flat))
    params = [Param(_legal(key)[:250], value) for key, value in flat[:PARAM_COUNT]]
    for start in range(0, len(params), BATCH):
        quietly(client.log_batch, run_id, params=params[start : start + BATCH])


def log_metrics(client: MlflowClient, run_id: str, metrics: Mapping[str, float], step: int) -> None:
    """A value that is no finite number would spoil its chart (MLflow stores inf as 1.8e308): logged as `<name>.non_finite` = 1."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    numbers = [(_legal(name), float(value)) for name, value in metrics.items()]
    finite = [(name, value) if math.isfinite(value) else (f"{name}.non_finite", 1.0) for name, value in numbers]
    client.log_batch(run_id, metrics=[Metric(name, value, now, step) for name, value in finite])


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}, "c": [{"d": 2}]} -> {"a.b": "1", "c.0.d": "2"}. Values are cut at PARAM_LENGTH; a list of plain values stays whole."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = str(value)
            flat[f"{prefix}{key}"] = text if len(text) <= PARAM_LENGTH else text[: PARAM_LENGTH - 3] + "..."
    return flat


def _legal(name: str) -> str:
    """A name every MLflow store accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def quietly(call: Callable, *args: Any, **kwargs: Any) -> None:
    try:
        call(*args, **kwargs)
    except Exception as error:
        log.warning("not recorded in MLflow: %s", first_line(error))


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reopen(client: MlflowClient, run_id: str) -> bool:
    """Sets an ended run RUNNING again; False when the store has no such run."""
    from mlflow.exceptions import MlflowException

    try:
        client.update_run(run_id, status="RUNNING")
    except MlflowException:
        return False
    return True


def settle_sweep(client: MlflowClient, experiment_id: str, sweep_id: str) -> None:
    """No job knows whether it is the last, so each sets the state: RUNNING while one runs, else FAILED if any did not finish."""
    jobs = client.search_runs([experiment_id], f"tags.`{PARENT}` = '{sweep_id}'")
    states = {run.info.status for run in jobs}
    if "RUNNING" not in states:
        client.set_terminated(sweep_id, "FINISHED" if states <= {"FINISHED"} else "FAILED")
