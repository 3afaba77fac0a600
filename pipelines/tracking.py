"""The record of a pipeline: sweep > pipeline run > stage runs, what each holds and how each ends. `mlflow_runs` does the calls.

Starting a run needs the tracking store; whatever is logged later is best effort: a store that fails then costs a warning,
never the computation. Importing this module does not import mlflow.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipelines import mlflow_runs as runs
from pipelines.mlflow_runs import PARAM_LENGTH, PARENT
from pipelines.process import sigterm_raises

SWEEP_MEMORY = "mlflow_sweep.json"  # in a sweep's folder: {"run_id": ...}
PAUSE_AFTER_FAILURE = 60.0  # seconds a reporter keeps quiet, so that a dead store does not slow a stage down

log = logging.getLogger(__name__)


def sqlite_uri(folder: Path) -> str:
    """The default tracking URI: a database in `folder`, absolute, so that it does not depend on the working directory."""
    return f"sqlite:///{Path(folder).expanduser().resolve() / 'mlflow.db'}"


def ui_command(tracking_uri: str) -> str:
    """The shell command that shows the runs, on this machine only; for a tracking server, its address."""
    uri = runs.absolute(tracking_uri)
    if uri.startswith(("http://", "https://")):
        return uri
    quiet = "MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"  # the latter: starts in half the time
    return f"{quiet} {shlex.quote(sys.executable)} -m mlflow ui --backend-store-uri {shlex.quote(uri)} --host 127.0.0.1 --workers 1"


@dataclass(frozen=True)
class SweepInfo:
    """One job's place in a Hydra multirun. All jobs of it name the same directory and so share one sweep run."""

    directory: Path
    name: str
    overrides: list[str]  # of this job


@dataclass
class RunReporter:
    """Logs curves of one run from any process on the machine (a `tasks.stage.Reporter`). Picklable; never raises."""

    tracking_uri: str
    run_id: str
    _warned: bool = field(default=False, init=False, repr=False)
    _quiet_until: float = field(default=0.0, init=False, repr=False)

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        if time.monotonic() < self._quiet_until:
            return
        try:
            database = runs.sqlite_path(self.tracking_uri)
            if database is not None and not database.exists():  # opening it would create an empty one, on another machine say
                raise FileNotFoundError(f"no tracking database {database} here")
            runs.log_metrics(runs.connect(self.tracking_uri), self.run_id, metrics, step)
        except Exception as error:
            self._quiet_until = time.monotonic() + PAUSE_AFTER_FAILURE
            if not self._warned:
                self._warned = True
                log.warning("curves of run %s are incomplete: %s", self.run_id, runs.first_line(error))


@dataclass(frozen=True)
class Tracker:
    """A pipeline run in progress. Made by `Tracker.start`."""

    tracking_uri: str  # absolute
    experiment_id: str
    run_id: str

    @classmethod
    @contextmanager
    def start(
        cls, *, tracking_uri: str, experiment: str, run_name: str, config: Mapping[str, Any], sweep: SweepInfo | None = None
    ) -> Iterator[Tracker]:
        """The pipeline run, RUNNING inside the block; then FINISHED, FAILED on an exception, KILLED on SIGTERM, Ctrl-C or exit.

        `config` is the fully resolved config. Raises UserError when the tracking store cannot be opened.
        """
        uri = runs.absolute(tracking_uri)
        with sigterm_raises():
            client, experiment_id = runs.open_experiment(uri, experiment)
            if sweep is None:
                run_id, sweep_id = runs.create_run(client, experiment_id, run_name, {"kind": "pipeline"}), None
            else:
                with _sweep_lock(sweep):  # until the sweep run has this job as a child, another job may believe that it was the last
                    sweep_id = _sweep_run(client, experiment_id, sweep)
                    tags = {"kind": "pipeline", PARENT: sweep_id, "overrides": " ".join(sweep.overrides)[:PARAM_LENGTH]}
                    run_id = runs.create_run(client, experiment_id, run_name, tags)
            try:
                with runs.ended(client, run_id):
                    runs.log_params(client, run_id, config)
                    runs.quietly(client.log_dict, run_id, json.loads(json.dumps(config, default=str)), "config.yaml")
                    yield cls(uri, experiment_id, run_id)
            finally:
                if sweep is not None:
                    with _sweep_lock(sweep):
                        runs.quietly(runs.settle_sweep, client, experiment_id, sweep_id)

    @contextmanager
    def stage(self, stage_id: str, *, fingerprint: str, params: Mapping[str, Any], cached: bool) -> Iterator[str]:
        """A child run with the same end states; yields its run id."""
        client = runs.connect(self.tracking_uri)
        tags = {"kind": "stage", PARENT: self.run_id, "stage": stage_id, "fingerprint": fingerprint, "cached": str(cached).lower()}
        run_id = runs.create_run(client, self.experiment_id, stage_id, tags)
        with runs.ended(client, run_id):
            runs.log_params(client, run_id, params)
            yield run_id

    def reporter(self, run_id: str) -> RunReporter:
        return RunReporter(self.tracking_uri, run_id)

    def log_metrics(self, metrics: Mapping[str, float], *, run_id: str | None = None) -> None:
        """Final numbers of a stage run; of the pipeline run when `run_id` is None."""
        runs.quietly(runs.log_metrics, runs.connect(self.tracking_uri), run_id or self.run_id, metrics, 0)

    def log_artifact(self, path: Path, folder: str | None = None, *, run_id: str | None = None) -> None:
        """Copies a file into `folder` of the run's artifacts; of the pipeline run's when `run_id` is None."""
        runs.quietly(runs.connect(self.tracking_uri).log_artifact, run_id or self.run_id, str(path), folder)


def _sweep_lock(sweep: SweepInfo) -> FileLock:
    sweep.directory.mkdir(parents=True, exist_ok=True)
    return FileLock(sweep.directory / ".mlflow_sweep.lock")


def _sweep_run(client: Any, experiment_id: str, sweep: SweepInfo) -> str:
    """The run that all jobs of this multirun share: made by the first of them and remembered in a file of the sweep's directory."""
    memory = sweep.directory / SWEEP_MEMORY
    if memory.exists():
        remembered = json.loads(memory.read_text())["run_id"]
        if runs.reopen(client, remembered):
            return remembered
        log.warning("%s names a run that the tracking store does not have; starting a new sweep run", memory)
    run_id = runs.create_run(client, experiment_id, sweep.name, {"kind": "sweep"})
    scratch = memory.with_suffix(".tmp")
    scratch.write_text(json.dumps({"run_id": run_id}))
    scratch.replace(memory)
    return run_id
