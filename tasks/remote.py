"""Running one stage's function as a Ray task: placed by its declared resources, heard while it works, stopped politely.

Knows neither store nor tracker. A task whose process or machine dies is reported as `WorkerLost`: whoever called may call again.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks import cluster as ray_cluster
from tasks.stage import StageContext

POLL_SECONDS = 0.5
PATIENCE = 30.0  # seconds that a stage has to end once it was asked to; then its process is killed
PATIENCE_WITH_WORKERS = 300.0  # a training saves its state first

log = logging.getLogger(__name__)


class WorkerLost(Exception):
    """The process or machine that ran the stage died."""


class Stopped(Exception):
    """The stage was asked to stop, and has."""


@dataclass(frozen=True)
class StageCall:
    """All that a machine of the cluster needs to run a stage; picklable."""

    run: str  # "tasks.distill.stage:run"
    config: Any
    inputs: Mapping[str, Path]
    output: Path
    context: StageContext
    folder: str = ""  # working directory of the caller: what relative paths start at

    def __call__(self) -> Mapping[str, float]:
        module, _, function = self.run.partition(":")
        return getattr(importlib.import_module(module), function)(self.config, self.inputs, self.output, self.context)


@dataclass(frozen=True)
class Ran:
    """What a stage returned, and how long its work and the start-up it needed took."""

    metrics: Mapping[str, float]
    seconds: float
    start_up: float


def run_here(call: StageCall) -> Ran:
    """In this process."""
    began, starting = time.monotonic(), ray_cluster.start_seconds()
    metrics = call()
    start_up = ray_cluster.start_seconds() - starting
    return Ran(metrics, time.monotonic() - began - start_up, start_up)


def run_on_ray(call: StageCall, *, cpus: float, gpus: float, threads: int, patience: float, stop: threading.Event, label: str) -> Ran:
    """As a Ray task on the cluster that `start_ray` has started. Call it in a thread: it waits, and passes the stage's log lines on.

    Raises what the stage raised, WorkerLost, or Stopped once `stop` is set.
    """
    import ray

    began = time.monotonic()
    mailbox = ray.remote(num_cpus=0)(_Mailbox).remote()
    # retries: one of Ray's own would begin in the middle of the first attempt's files. calls: workers that a stage has left end with its process
    task = ray.remote(max_retries=0, max_calls=1)(_work).options(num_cpus=cpus, num_gpus=gpus, name=call.output.name)
    running = task.remote(replace(call, folder=os.getcwd()), threads, mailbox)
    asked_at: float | None = None
    forced = False
    try:
        while not ray.wait([running], timeout=POLL_SECONDS)[0]:
            _pass_on(mailbox, label)
            if stop.is_set() and asked_at is None:
                asked_at = time.monotonic()
                ray.cancel(running, force=False, recursive=False)  # as Ctrl-C in its process: what it started is its own to end
            elif asked_at is not None and not forced and time.monotonic() - asked_at > patience:
                forced = True
                ray.cancel(running, force=True)
        _pass_on(mailbox, label)
        metrics, seconds, start_up = ray.get(running)
    except ray.exceptions.RayTaskError as error:
        if stop.is_set():
            raise Stopped from error
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        if stop.is_set():
            raise Stopped from error
        raise WorkerLost(next(iter(str(error).strip().splitlines()), type(error).__name__)) from error
    finally:
        ray.kill(mailbox)
    return Ran(metrics, seconds - start_up, time.monotonic() - began - seconds + start_up)


def _work(call: StageCall, threads: int, mailbox: Any) -> tuple[Mapping[str, float], float, float]:
    """In a process of Ray's: metrics, seconds from here on, and those of them spent starting workers."""
    began = time.monotonic()
    ray_cluster.become_task()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # torch is not imported yet: composing and sending a stage is light
    if os.path.isdir(call.folder):
        os.chdir(call.folder)
    root, handler = logging.getLogger(), _Post(mailbox)
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        ran = run_here(call)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.flush()
    return dict(ran.metrics), time.monotonic() - began, ran.start_up


class _Mailbox:
    """Log records on their way to whoever waits for the stage."""

    def __init__(self) -> None:
        self._records: list[tuple[str, int, str]] = []

    def put(self, name: str, level: int, text: str) -> None:
        self._records.append((name, level, text))

    def take(self) -> list[tuple[str, int, str]]:
        taken, self._records = self._records, []
        return taken


class _Post(logging.Handler):
    """Sends this process's log lines to a mailbox."""

    def __init__(self, mailbox: Any) -> None:
        super().__init__(logging.INFO)
        self._mailbox, self._last = mailbox, None

    def emit(self, record: logging.LogRecord) -> None:
        self._last = self._mailbox.put.remote(record.name, record.levelno, self.format(record))

    def flush(self) -> None:
        """Returns when the last line has arrived."""
        if self._last is not None:
            import ray

            ray.wait([self._last], timeout=10)


def _pass_on(mailbox: Any, label: str) -> None:
    import ray

    try:
        records = ray.get(mailbox.take.remote(), timeout=30)
    except ray.exceptions.RayError:  # its machine is gone or too busy: the stage itself does not depend on its log
        return
    for name, level, text in records:
        logging.getLogger(name).log(level, "%s: %s", label, text)
