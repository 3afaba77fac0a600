"""The stage graph: what depends on what, and what is already done. Knows nothing of any one stage; `execute` runs what is not.

The graph is static once the config is composed: every fingerprint is known before anything runs, so a plan can be shown first.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pipelines.graph.room import Needs
from pipelines.store import Store, fingerprint, plain
from tasks.stage import UserError


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
    needs: Needs = field(default_factory=Needs)  # of the cluster, and where it may run


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
        self.check_ids(until=[stage_id])
        wanted = {stage_id}
        for stage in reversed(self.stages):
            if stage.id in wanted:
                wanted.update(stage.inputs.values())
        return Graph(stage for stage in self.stages if stage.id in wanted)

    def check_ids(self, **settings: Iterable[str]) -> None:
        """Raises UserError, a line with the nearest names for each id that is no stage; settings: where the user wrote them, and which."""
        known = [stage.id for stage in self.stages]
        mistakes = []
        for setting, ids in settings.items():
            for stage_id in dict.fromkeys(ids):
                if stage_id not in known:
                    nearest = difflib.get_close_matches(stage_id, known, n=3, cutoff=0.4) or known
                    mistakes.append(f"{setting}: no stage {stage_id!r} in this run; nearest: {', '.join(nearest)}")
        if mistakes:
            raise UserError("\n".join(mistakes))


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
    graph.check_ids(force=force)
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
