"""Why a stage of a config is not cached: the finished one of its kind that is nearest, and which fields differ, down to the cause.

Where the difference is an input made by another stage, that stage is compared in turn with what the nearest one was made from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.graph.dag import Graph, Stage
from pipelines.store.disk import Entry, Store
from pipelines.store.manifest import Manifest, plain

ABSENT = "(not there)"
LONGEST = 60  # characters of a value that are shown


def explain(target: str, graph: Graph, store: Store) -> list[str]:
    """Lines about `target`: a stage id of the graph, or the folder of a stage, which is then what its stage in the graph is compared with.

    Raises UserError where it is neither.
    """
    entries = [entry for entry in store.entries() if entry.manifest is not None]
    by_name = {entry.name: entry for entry in entries}
    name = Path(target.rstrip("/")).name
    if target in graph.fingerprints:
        return list(_explain(target, graph, store, entries))
    if name in by_name:
        return list(_explain_folder(by_name[name], graph, store, entries))
    if (store.root / name).is_dir() and re.search(r"-[0-9a-f]{16}$", name):
        return [f"{name}: was never finished (no manifest); the stage goes on or starts again when a run needs it"]
    graph.check_ids(explain=[target])
    raise AssertionError("unreachable")


def _explain(stage_id: str, graph: Graph, store: Store, entries: Sequence[Entry]) -> Iterator[str]:
    stage, name = _stage(graph, stage_id), _folder_name(graph, stage_id, store)
    found = next((entry for entry in entries if entry.name == name), None)
    if found and found.state == "finished":
        yield f"{stage_id}: cached in {name} (computed as {found.manifest.stage}, {found.manifest.started})"
        return
    if found:
        yield f"{stage_id}: {name} is {found.state}: {store.glance(store.root / name) or 'a file is missing or has another size'}"
        return
    yield f"{stage_id}: not cached, {name} is not in the store"
    others = [entry.manifest for entry in entries if entry.manifest.kind == stage.kind]
    if not others:
        yield f"  no finished {stage.kind} is there to compare with"
        return
    nearest = min(others, key=lambda manifest: (len(_differences(manifest, stage, graph)), manifest.stage != stage_id))
    yield from _compared(nearest, stage, graph, entries, indent="  ")


def _explain_folder(entry: Entry, graph: Graph, store: Store, entries: Sequence[Entry]) -> Iterator[str]:
    manifest = entry.manifest
    wrong = store.glance(store.root / entry.name)
    yield f"{entry.name}: {'damaged: ' + wrong if wrong else entry.state} ({manifest.stage}, {manifest.started})"
    same = [stage for stage in graph.stages if stage.kind == manifest.kind]
    stage = min(same, key=lambda stage: (len(_differences(manifest, stage, graph)), stage.id != manifest.stage), default=None)
    if stage is None:
        yield f"  this config has no stage of kind {manifest.kind}"
    elif graph.fingerprints[stage.id] == manifest.fingerprint:
        yield f"  is what {stage.id} of this config needs"
    else:
        yield f"  nearest stage of this config: {stage.id} ({_folder_name(graph, stage.id, store)})"
        yield from _compared(manifest, stage, graph, entries, indent="  ")


def _compared(manifest: Manifest, stage: Stage, graph: Graph, entries: Sequence[Entry], *, indent: str) -> Iterator[str]:
    """The differences, an input's with those of its own stage below it."""
    yield f"{indent}nearest finished: {manifest.kind}-{manifest.fingerprint} ({manifest.stage}); there -> here:"
    for field, (there, here) in _differences(manifest, stage, graph).items():
        yield f"{indent}  {field}: {_short(there)} -> {_short(here)}"
        source = stage.inputs.get(field.removeprefix("upstream.")) if field.startswith("upstream.") else None
        made_from = next((entry.manifest for entry in entries if entry.manifest.fingerprint == there), None)
        if source and made_from:
            upstream = _stage(graph, source)
            if upstream.kind == made_from.kind:
                yield from _compared(made_from, upstream, graph, entries, indent=f"{indent}    ")
        elif source and there is not ABSENT:
            yield f"{indent}    made from {there}, which is no longer in the store"


def _differences(manifest: Manifest, stage: Stage, graph: Graph) -> dict[str, tuple[Any, Any]]:
    """Field -> (there, here), of all that a fingerprint is made of."""
    upstream = {name: graph.fingerprints[source] for name, source in stage.inputs.items()}
    there = {"version": manifest.version, "config": manifest.config, "external": manifest.external, "upstream": manifest.upstream}
    here = {"version": stage.version, "config": plain(stage.config), "external": plain(stage.external), "upstream": upstream}
    old, new = dict(_leaves(there)), dict(_leaves(here))
    names = [*new, *(name for name in old if name not in new)]
    return {name: (old.get(name, ABSENT), new.get(name, ABSENT)) for name in names if old.get(name, ABSENT) != new.get(name, ABSENT)}


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        elif inner != {} or prefix:  # a whole part that is empty is no field
            yield prefix + key, inner


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _stage(graph: Graph, stage_id: str) -> Stage:
    return next(stage for stage in graph.stages if stage.id == stage_id)


def _folder_name(graph: Graph, stage_id: str, store: Store) -> str:
    return store.folder(_stage(graph, stage_id).kind, graph.fingerprints[stage_id]).name
