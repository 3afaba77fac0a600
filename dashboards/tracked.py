"""The tracking store, read through MLflow's client: pipeline runs, their stages, the results they ended with. Writes nothing there.

Raises `stored.Unreadable`, one sentence, where the store or an artifact is not there. Importing this module does not import mlflow.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashboards.stored import Unreadable, read_json

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Read by mlflow when it is imported: nothing is sent anywhere, an unreachable server is given up after seconds.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}.items():
    os.environ.setdefault(_name, _value)

RESULTS = "report/results.json"
MOST_RUNS = 200  # pipeline runs to choose from, the newest


@dataclass(frozen=True)
class TrackedRun:
    """A pipeline run."""

    run_id: str
    experiment_id: str
    name: str  # in a sweep with what tells it from the other jobs
    status: str
    started: datetime

    @property
    def title(self) -> str:
        return f"{self.name} · {self.started:%Y-%m-%d %H:%M} · {self.status.lower()} · {self.run_id[:6]}"


def connect(uri: str) -> MlflowClient:
    """Raises Unreadable for a database that does not exist (the client would create an empty one)."""
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        raise Unreadable(
            f"There is no tracking store at {uri.removeprefix('sqlite:///')}: no pipeline has run there yet (make quickstart does), or it lies "
            "elsewhere (set it in the sidebar)."
        )
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(uri)


def pipeline_runs(client: MlflowClient) -> list[TrackedRun]:
    """The newest first; of every experiment that is not deleted. Raises Unreadable where the store does not answer."""
    try:
        experiments = [found.experiment_id for found in client.search_experiments()]
        runs = client.search_runs(experiments, "tags.kind = 'pipeline'", order_by=["attributes.start_time DESC"], max_results=MOST_RUNS)
    except Exception as error:  # every kind of store raises its own kinds
        raise Unreadable(f"The tracking store cannot be read ({_first_line(error)}).") from error
    return [_tracked(run) for run in runs]


def _tracked(run: Any) -> TrackedRun:
    tags, info = run.data.tags, run.info
    name = " ".join([tags.get("mlflow.runName") or "run", *filter(None, [tags.get("overrides")])])
    return TrackedRun(info.run_id, info.experiment_id, name, info.status, datetime.fromtimestamp(info.start_time / 1000, tz=UTC))


def stages(client: MlflowClient, run: TrackedRun) -> dict[str, str]:
    """Stage id -> fingerprint, by which its folder in the store is known; in the order in which they ran."""
    try:
        children = client.search_runs([run.experiment_id], f"tags.`mlflow.parentRunId` = '{run.run_id}'", order_by=["attributes.start_time ASC"])
    except Exception as error:
        raise Unreadable(f"The tracking store cannot be read ({_first_line(error)}).") from error
    tags = [child.data.tags for child in children]
    return {tag["stage"]: tag["fingerprint"] for tag in tags if "stage" in tag and "fingerprint" in tag}


def results(client: MlflowClient, run: TrackedRun) -> dict[str, Any]:
    """The content of the run's results.json. Raises Unreadable where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = client.download_artifacts(run.run_id, RESULTS, folder)
        except Exception as error:
            state = run.status.lower()
            raise Unreadable(
                f"Run {run.name} ({run.run_id[:6]}, {state}) has no {RESULTS}: it did not reach its report, or it was deleted."
            ) from error
        found = read_json(Path(path))
    if found.get("schema_version") != 1:
        raise Unreadable(f"Run {run.name} has results of version {found.get('schema_version')}; this app reads version 1.")
    return found


def rows(found: dict[str, Any], run: TrackedRun) -> list[dict[str, Any]]:
    """The result rows of prompts decoded alone, with their `run`."""
    return [row | {"run": run.title} for row in found["rows"] if row["batch_size"] == 1]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
