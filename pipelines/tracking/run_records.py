"""What every run of ours in MLflow is given and how it ends: who made it, its params, its last state."""

from __future__ import annotations

import logging
import re
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipelines.process import identity
from pipelines.store import git_sha
from pipelines.tracking.channel import Channel
from pipelines.tracking.mlflow_runs import first_line

PARAM_LENGTH = 500  # characters; the full config is an artifact
PARAM_COUNT = 500

log = logging.getLogger(__name__)


def create_run(channel: Channel, name: str, tags: Mapping[str, str], handle: str | None = None) -> str:
    sha = git_sha()
    commit = {"mlflow.source.git.commit": sha} if sha else {}
    return channel.create_run(handle=handle or uuid.uuid4().hex, name=name, tags={**tags, **commit, **identity()})


@contextmanager
def ended(channel: Channel, run_id: str) -> Iterator[None]:
    def end(status: str, tags: Mapping[str, str]) -> None:
        channel.send("end_run", run=run_id, status=status, ended=int(time.time() * 1000), tags=tags)

    try:
        yield
    except BaseException as error:
        killed = isinstance(error, KeyboardInterrupt | SystemExit)  # Ray turns SIGTERM into its own SystemExit
        end("KILLED" if killed else "FAILED", {"error": f"{type(error).__name__}: {first_line(error)}"[:PARAM_LENGTH]})
        if not killed:
            channel.send("log_text", run=run_id, text=traceback.format_exc(), name="traceback.txt")
        raise
    end("FINISHED", {})


def log_params(channel: Channel, run_id: str, config: Mapping[str, Any]) -> None:
    flat = list(flatten(config).items())
    if len(flat) > PARAM_COUNT:
        log.warning("run %s: only the first %d of %d params are logged; config.yaml has all", run_id, PARAM_COUNT, len(flat))
    if flat:
        channel.send("log_params", run=run_id, params={legal(key)[:250]: value for key, value in flat[:PARAM_COUNT]})


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


def legal(name: str) -> str:
    """A name every MLflow store accepts."""
    return re.sub(r"[^\w\-. :/]", "_", name)
