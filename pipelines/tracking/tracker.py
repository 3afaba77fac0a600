"""The record of a pipeline: sweep > pipeline run > stage runs, what each holds and how each ends.

A store that is away costs nothing but time until its records arrive (`channel`); only one that has never answered is an
error at the start: its address is wrong. Importing this module does not import mlflow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml
from filelock import FileLock

from pipelines.credentials import redacted
from pipelines.process import sigterm_raises
from pipelines.tracking import lineage
from pipelines.tracking import mlflow_runs as runs
from pipelines.tracking.backlog import SUFFIX
from pipelines.tracking.channel import Channel, left_behind
from pipelines.tracking.mlflow_runs import PARENT
from pipelines.tracking.run_records import PARAM_LENGTH, create_run, ended, legal, log_params
from pipelines.tracking.settings import TrackingConfig
from pipelines.tracking.system_metrics import watched
from tasks.stage import UserError

if TYPE_CHECKING:
    from pipelines.graph.dag import PlannedStage
    from pipelines.store import Manifest

SWEEP_MEMORY = "mlflow_sweep.json"  # in a sweep's folder: which run is the sweep's
BACKLOG = ".tracking"  # in the store: records that wait
REACHED = "reached"  # in the backlogs' folder: files named by the tracking URIs that have answered

log = logging.getLogger(__name__)


def sqlite_uri(folder: Path) -> str:
    """The default tracking URI: a database in `folder`, absolute, so that it does not depend on the working directory."""
    return f"sqlite:///{Path(folder).expanduser().resolve() / 'mlflow.db'}"


def ui_command(tracking_uri: str) -> str:
    """The shell command that shows the runs, on this machine only; for a tracking server, its address. Credentials are left to be filled in."""
    uri = redacted(runs.absolute(tracking_uri))
    if uri.startswith(("http://", "https://")):
        return uri
    quiet = "MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false"  # the latter: starts in half the time
    return f"{quiet} {shlex.quote(sys.executable)} -m mlflow ui --backend-store-uri {shlex.quote(uri)} --host 127.0.0.1 --workers 1"


def ui_address(tracking_uri: str) -> str | None:
    """Where the runs are to be seen once `ui_command` runs; a tracking server's own address, without a password in it; None for any other service."""
    uri = runs.absolute(tracking_uri)
    if uri.startswith(("http://", "https://")):
        parts = urlsplit(uri)
        return redacted(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    return "http://127.0.0.1:5000" if uri.startswith(("sqlite:", "file:", "postgresql", "mysql")) else None


@dataclass(frozen=True)
class SweepInfo:
    """One job's place in a Hydra multirun. All jobs of it name the same directory and so share one sweep run."""

    directory: Path
    name: str
    overrides: list[str]  # of this job


@dataclass(frozen=True)
class RunReporter:
    """Logs curves of one run from any process (a `tasks.stage.Reporter`). Picklable; never raises."""

    channel: Channel
    run_id: str

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        """A value that is no finite number would spoil its chart (MLflow stores inf as 1.8e308): logged as `<name>.non_finite` = 1."""
        now = int(time.time() * 1000)
        numbers = [(legal(name), float(value)) for name, value in metrics.items()]
        finite = [(name, value) if math.isfinite(value) else (f"{name}.non_finite", 1.0) for name, value in numbers]
        self.channel.send("log_metrics", run=self.run_id, metrics=[(name, value, now, int(step)) for name, value in finite])


@dataclass(frozen=True)
class Tracker:
    """A pipeline run in progress. Made by `Tracker.start`."""

    channel: Channel
    run_id: str
    model: str  # registered model that exports become versions of
    settings: TrackingConfig

    @property
    def experiment_id(self) -> str:
        return self.channel.store.experiment_id

    @classmethod
    @contextmanager
    def start(
        cls,
        *,
        tracking_uri: str,
        backlog: Path,
        run_name: str,
        config: Mapping[str, Any],
        sweep: SweepInfo | None = None,
        settings: TrackingConfig | None = None,
    ) -> Iterator[Tracker]:
        """The pipeline run, RUNNING inside the block; then FINISHED, FAILED on an exception, KILLED on SIGTERM, Ctrl-C or exit.

        `config` is the fully resolved config; `backlog` the folder, seen by all nodes, where records wait for a store that is away.
        Raises UserError when the tracking store cannot be opened and never could be from here.
        """
        settings = settings or TrackingConfig()
        handle = uuid.uuid4().hex
        channel = Channel(runs.absolute(tracking_uri), settings.experiment, Path(backlog).resolve() / f"{handle}{SUFFIX}")
        with sigterm_raises():
            opened = _open(channel)
            try:
                tags = {"kind": "pipeline"}
                if sweep is None:
                    sweep_id, run_id = None, create_run(channel, run_name, tags, handle)
                else:
                    with _sweep_lock(sweep):  # until the sweep run has this job as a child, another job may believe that it was the last
                        sweep_id = _sweep_run(channel, sweep)
                        tags |= {PARENT: sweep_id, "overrides": " ".join(sweep.overrides)[:PARAM_LENGTH]}
                        run_id = create_run(channel, run_name, tags, handle)
                try:
                    with ended(channel, run_id):
                        log_params(channel, run_id, config)
                        text = yaml.safe_dump(json.loads(json.dumps(config, default=str)), sort_keys=False)
                        channel.send("log_text", run=run_id, text=text, name="config.yaml")
                        model = re.sub(r"[/:'\"`]", "-", settings.model or run_name)
                        yield cls(channel, run_id, model, settings)
                finally:
                    if sweep is not None:
                        with _sweep_lock(sweep):
                            channel.send("settle_sweep", run=sweep_id)
            finally:
                if channel.close(settings.wait_at_end) and not opened:
                    with runs.said("runs whose process died are still shown as running"):
                        _open(channel)

    @contextmanager
    def stage(self, stage_id: str, *, fingerprint: str, params: Mapping[str, Any], cached: bool) -> Iterator[str]:
        """A child run with the same end states; yields its run id."""
        tags = {"kind": "stage", PARENT: self.run_id, "stage": stage_id, "fingerprint": fingerprint, "cached": str(cached).lower()}
        run_id = create_run(self.channel, stage_id, tags)
        with ExitStack() as stack:
            stack.enter_context(ended(self.channel, run_id))
            if not cached:
                stack.enter_context(watched(self.reporter(run_id), every=self.settings.system_metrics_every))
            log_params(self.channel, run_id, params)
            yield run_id

    def reporter(self, run_id: str) -> RunReporter:
        return RunReporter(self.channel, run_id)

    def log_metrics(self, metrics: Mapping[str, float], *, run_id: str | None = None) -> None:
        """Final numbers of a stage run; of the pipeline run when `run_id` is None."""
        self.reporter(run_id or self.run_id)(metrics, 0)

    def log_artifact(self, path: Path, folder: str | None = None, *, run_id: str | None = None) -> None:
        """Copies a file into `folder` of the run's artifacts; of the pipeline run's when `run_id` is None."""
        self.channel.send("log_file", run=run_id or self.run_id, path=str(Path(path).resolve()), folder=folder)

    def log_lineage(self, planned: PlannedStage, manifest: Manifest, *, run_id: str, folder: str) -> None:
        """The data that a finished stage's run was made from and, of an export, the registered model that it is.

        folder: URI of the stage's output; on object storage `planned.folder` may hold nothing.
        """
        datasets = lineage.datasets(planned, manifest, folder)
        if datasets:
            self.channel.send("log_datasets", run=run_id, datasets=datasets)
        if planned.stage.kind == "prompts":
            self.channel.send("log_datasets", run=self.run_id, datasets=datasets)
        export, last_export = lineage.export(planned, folder), lineage.last_export(planned)
        if self.settings.register and export:
            self.channel.send("register_model", run=run_id, model=self.model, **export)
        if self.settings.register and last_export:
            self.channel.send("name_model", model=self.model, fingerprint=last_export, alias=self.settings.alias)


def _open(channel: Channel) -> bool:
    """Whether it is open, what earlier runs left is sent and the runs of dead processes are ended.

    Raises UserError for a store that has never answered from here; of one that has, being away now is an outage like any other.
    """
    folder = channel.file.parent
    reached = folder / REACHED / hashlib.sha256(redacted(channel.tracking_uri).encode()).hexdigest()[:16]
    try:
        channel.store.open(before_reaping=lambda: send_left_behind(folder, channel.tracking_uri))
    except Exception as error:
        if runs.refused(error) or not reached.exists():
            uri, name = redacted(channel.tracking_uri), channel.experiment
            raise UserError(f"paths.tracking_uri={uri}: cannot open experiment {name!r}: {runs.first_line(error)}") from error
        return False  # the first record finds out and says so
    with runs.said(f"{reached} cannot be written"):
        reached.parent.mkdir(parents=True, exist_ok=True)
        reached.touch()
    return True


def send_left_behind(folder: Path, tracking_uri: str | None = None) -> bool:
    """Sends the backlogs that runs left in a folder, of one store or of all; whether all of them arrived."""
    channels = [channel for channel in left_behind(folder, tracking_uri) if tracking_uri in (None, channel.tracking_uri)]
    arrived = [channel.deliver(now=True) for channel in channels]
    return all(arrived)


def _sweep_lock(sweep: SweepInfo) -> FileLock:
    sweep.directory.mkdir(parents=True, exist_ok=True)
    return FileLock(sweep.directory / ".mlflow_sweep.lock")


def _sweep_run(channel: Channel, sweep: SweepInfo) -> str:
    """The run that all jobs of this multirun share: its handle is made by the first of them and remembered in the sweep's directory.

    So is where its records go: `pipelines.sweep` adds the table after the last job.
    """
    memory = sweep.directory / SWEEP_MEMORY
    handle = json.loads(memory.read_text())["handle"] if memory.exists() else uuid.uuid4().hex
    run_id = create_run(channel, sweep.name, {"kind": "sweep"}, handle)
    scratch = memory.with_suffix(".tmp")
    where = {"tracking_uri": redacted(channel.tracking_uri), "experiment": channel.experiment, "backlog": str(channel.file.parent)}
    scratch.write_text(json.dumps({"handle": handle, "run_id": run_id, **where}))
    scratch.replace(memory)
    return run_id
