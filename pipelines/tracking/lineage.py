"""What a stage's run is linked to besides its parent: the data it read, and the model it is. Reads nothing; `tracking` records it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.graph.dag import PlannedStage
    from pipelines.store import Manifest

DATA = {"prompts", "packed", "trajectories"}  # names of inputs that are data; the others are models and results
JUDGING = {"answers", "speed", "evaluate", "search"}  # kinds of stages that do not train on what they read
EXPORTS = {"export", "final"}  # kinds whose folder is an ordinary checkpoint
LAST_EXPORT = "export/final"  # the report's name for the model a run ends in
DIGEST = 36  # characters that MLflow takes


def datasets(planned: PlannedStage, manifest: Manifest, folder: str) -> list[dict[str, str]]:
    """As `mlflow_writes.log_datasets` takes them: a digest is the fingerprint of the stage that made the data. folder: URI of its output."""
    stage = planned.stage
    if stage.kind == "prompts":  # made from outside: named as the user named it
        named = {name: manifest.config.get(name) for name in ("source", "path", "subset", "revision", "train", "validation", "test", "seed")}
        outside = {**named, "identity": stage.external.get("data"), "folder": folder}
        return [_dataset("prompts", planned.fingerprint, outside, profile=manifest.metrics, context="training")]
    context = "evaluation" if stage.kind in JUDGING else "training"
    return [
        _dataset(name, planned.upstream[name], {"folder": source.as_uri()}, context=context)
        for name, source in planned.inputs.items()
        if name in DATA
    ]


def export(planned: PlannedStage, folder: str) -> dict[str, str] | None:
    """As `mlflow_writes.register_model` takes it; None for a stage that makes no checkpoint."""
    if planned.stage.kind not in EXPORTS:
        return None
    return {"stage": planned.stage.id, "fingerprint": planned.fingerprint, "folder": folder}


def last_export(planned: PlannedStage) -> str | None:
    """Fingerprint of the model that a run ended in; None for any stage but its report."""
    return planned.upstream.get(LAST_EXPORT) if planned.stage.kind == "report" else None


def _dataset(name: str, digest: str, source: Mapping[str, Any], *, context: str, profile: Mapping[str, Any] | None = None) -> dict[str, str]:
    return {
        "name": name,
        "digest": digest[:DIGEST],
        "source_type": "jacobi_forcing_stage",
        "source": json.dumps(source),
        "profile": json.dumps(dict(profile or {})),
        "context": context,
    }
