"""The stage graph: what depends on what, what is already done, and running the rest in order. Knows nothing of any one stage.

The graph is static once the config is composed: every fingerprint is known before anything runs, so a plan can be shown first.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.store import Manifest, Store, fingerprint, git_sha, plain
from tasks.stage import ClusterConfig, StageContext, UserError

if TYPE_CHECKING:
    from pipelines.tracking import Tracker

HEADLINES = 4  # metrics shown in a log line: a stage returns its most telling ones first

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """One node of the graph."""

    id: str  # "round1/distill": unique, and what `until` and `force` take
    kind: str  # "distill": what the fingerprint and the folder name are made of
    version: int  # raised by whoever changes what the stage computes
    run: str  # "tasks.distill:run", imported only when it must run
    config: Any  # the stage's own dataclass
    inputs: Mapping[str, str] = field(default_factory=dict)  # input name -> stage id
    external: Mapping[str, Any] = field(default_factory=dict)  # identity of inputs that no stage made, as JSON types
    resumable: bool = False  # finds its own unfinished files in its folder and goes on from there


@dataclass(frozen=True)
class PlannedStage:
    """A stage with where its inputs and its output are, and whether the output is already there."""

    stage: Stage
    fingerprint: str
    folder: Path
    cached: bool
    forced: bool
    inputs: Mapping[str, Path]  # input name -> folder of the upstream stage
    upstream: Mapping[str, str]  # input name -> fingerprint of the upstream stage


class Graph:
    """Stages in topological order, otherwise as declared. Raises ValueError on an unknown input, a duplicate id or a cycle."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        declared = list(stages)
        by_id = {stage.id: stage for stage in declared}
        for position, stage in enumerate(declared):
            if by_id[stage.id] is not stage:
                raise ValueError(f"stage {stage.id!r} is declared twice (again at position {position})")
            for name, upstream in stage.inputs.items():
                if upstream not in by_id:
                    raise ValueError(f"stage {stage.id!r}: input {name!r} names the unknown stage {upstream!r}")
        self.stages: tuple[Stage, ...] = tuple(by_id[stage_id] for stage_id in _ordered(by_id))
        self.fingerprints: dict[str, str] = {}
        for stage in self.stages:
            self.fingerprints[stage.id] = fingerprint(
                stage=stage.kind,
                version=stage.version,
                config=plain(stage.config),
                upstream={name: self.fingerprints[upstream] for name, upstream in stage.inputs.items()},
                external=stage.external,
            )

    def until(self, stage_id: str) -> Graph:
        """The graph of that stage and everything it needs. Raises UserError for an unknown id."""
        self.check_ids("until", [stage_id])
        wanted = {stage_id}
        for stage in reversed(self.stages):
            if stage.id in wanted:
                wanted.update(stage.inputs.values())
        return Graph(stage for stage in self.stages if stage.id in wanted)

    def check_ids(self, setting: str, ids: Iterable[str]) -> None:
        """Raises UserError, with the nearest names, for the first id that is no stage; `setting` is where the user wrote it."""
        known = [stage.id for stage in self.stages]
        for stage_id in ids:
            if stage_id not in known:
                nearest = difflib.get_close_matches(stage_id, known, n=3, cutoff=0.4) or known
                raise UserError(f"{setting}: no stage {stage_id!r} in this run; nearest: {', '.join(nearest)}")


def _ordered(by_id: Mapping[str, Stage]) -> list[str]:
    rank = {stage_id: position for position, stage_id in enumerate(by_id)}
    sorter = TopologicalSorter({stage.id: stage.inputs.values() for stage in by_id.values()})
    try:
        sorter.prepare()
    except CycleError as error:
        raise ValueError(f"stages depend on each other: {' <- '.join(error.args[1])}") from error
    order: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready.extend(sorter.get_ready())
        first = min(ready, key=rank.__getitem__)  # one at a time: keeps a valid declaration order exactly
        ready.remove(first)
        order.append(first)
        sorter.done(first)
    return order


def plan(graph: Graph, store: Store, force: Collection[str] = ()) -> list[PlannedStage]:
    """What `execute` would do; changes nothing. Raises UserError for an unknown id in `force`.

    A forced stage is recomputed from an empty folder under the same fingerprint. Its descendants are not, unless listed
    themselves: stages are deterministic, so what they were made from has not changed.
    """
    graph.check_ids("force", force)
    folders = {stage.id: store.folder(stage.kind, graph.fingerprints[stage.id]) for stage in graph.stages}
    return [
        PlannedStage(
            stage=stage,
            fingerprint=graph.fingerprints[stage.id],
            folder=folders[stage.id],
            cached=stage.id not in force and store.finished(folders[stage.id]) is not None,
            forced=stage.id in force,
            inputs={name: folders[source] for name, source in stage.inputs.items()},
            upstream={name: graph.fingerprints[source] for name, source in stage.inputs.items()},
        )
        for stage in graph.stages
    ]


def execute(
    plan: Sequence[PlannedStage], store: Store, tracker: Tracker, cluster: ClusterConfig, *, trust_remote_code: bool = False
) -> dict[str, Manifest]:
    """Runs what is not finished, in order; stage id -> manifest. A stage's exception propagates and what is finished stays.

    The store is asked again just before each stage, since another run may have finished it, or removed it, after `plan` looked.
    """
    manifests: dict[str, Manifest] = {}
    for position, planned in enumerate(plan, start=1):
        stage = planned.stage
        label = f"[{position}/{len(plan)}] {stage.id}"
        manifest = None if planned.forced else store.finished(planned.folder)
        if manifest is None:
            with store.lock(planned.fingerprint):
                manifest = None if planned.forced else store.finished(planned.folder)
                if manifest is None:
                    manifests[stage.id] = _compute(planned, label, store, tracker, cluster, trust_remote_code)
                    continue
        log.info("%s: cached%s", label, _headline(manifest.metrics))
        with tracker.stage(stage.id, fingerprint=planned.fingerprint, params=manifest.config, cached=True) as run_id:
            tracker.log_metrics(manifest.metrics, run_id=run_id)
        manifests[stage.id] = manifest
    return manifests


def _compute(planned: PlannedStage, label: str, store: Store, tracker: Tracker, cluster: ClusterConfig, trust_remote_code: bool) -> Manifest:
    stage, config = planned.stage, plain(planned.stage.config)
    log.info("%s: running", label)
    started, clock = datetime.now(UTC), time.monotonic()
    with tracker.stage(stage.id, fingerprint=planned.fingerprint, params=config, cached=False) as run_id:
        try:
            # A forced stage starts from nothing: its old files would make a resumable one believe that it is done.
            store.prepare(planned.folder, resume=stage.resumable and not planned.forced)
            module, _, function = stage.run.partition(":")
            run = getattr(importlib.import_module(module), function)
            context = StageContext(report=tracker.reporter(run_id), cluster=cluster, trust_remote_code=trust_remote_code)
            metrics = run(stage.config, planned.inputs, planned.folder, context)
        except BaseException as error:
            log.error("%s: stopped after %.1f s by %s", label, time.monotonic() - clock, type(error).__name__)
            raise
        seconds = time.monotonic() - clock
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        manifest = Manifest(
            stage=stage.id,
            kind=stage.kind,
            version=stage.version,
            fingerprint=planned.fingerprint,
            config=config,
            upstream=planned.upstream,
            external=plain(stage.external),
            metrics=numbers,
            started=started.isoformat(timespec="seconds"),
            seconds=round(seconds, 3),
            mlflow_run_id=run_id,
            git_sha=git_sha(),
        )
        manifest = store.commit(planned.folder, manifest)
        tracker.log_metrics({**numbers, "seconds": seconds}, run_id=run_id)
    log.info("%s: done in %.1f s%s", label, seconds, _headline(numbers))
    return manifest


def _headline(metrics: Mapping[str, float]) -> str:
    shown = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in list(metrics.items())[:HEADLINES]]
    return f" ({', '.join(shown)})" if shown else ""
