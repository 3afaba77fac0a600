"""Stage `excerpts`: what the report shows of stages whose files are too large to be kept for it, and what every stage of the run took.

One block's trajectory and the first packed row of every round, one prompt as every model decoded it, and the facts of all manifests. No model, no
torch, a second or two. What is not there is a sentence in its place (`missing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks import artifacts, completion_files, trajectory_files
from tasks.packed_files import PackedRows
from tasks.stage import StageContext, UserError

SCHEMA_VERSION = 1
INPUT = "stage/"  # and the id of the stage: how this stage's inputs are called
CANDIDATES = 64  # answers, the first of a stage, whose blocks may be chosen
MOST_POSITIONS = 64  # of a block that are kept: more are too narrow to be read

_FACTS = ("stage", "kind", "version", "fingerprint", "config", "metrics", "started", "seconds", "mlflow_run_id", "git_sha")


@dataclass
class ExcerptsConfig:
    """Nothing to set."""


def run(config: ExcerptsConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """Write `excerpts.json` (see docs/schemas.md).

    Args:
        inputs: `stage/<id>`, the folder of every stage of the run, in its order.
    """
    stages = {name.removeprefix(INPUT): folder for name, folder in inputs.items()}
    trajectories = [_kept(name, folder, _trajectory) for name, folder in _of_rounds(stages, "trajectories")]
    packed = [_kept(name, folder, _packed) for name, folder in _of_rounds(stages, "pack")]
    models = [(name.rpartition("/")[0], folder) for name, folder in stages.items() if name.endswith("/speed") and name.count("/") == 1]
    decoded = [line for model, folder in models for line in _decoded(model, folder)]
    shown = {i for part in trajectories for state in part.get("states", ()) for i in state} | {i for p in packed for i in p.get("input_ids", ())}
    found = {
        "schema_version": SCHEMA_VERSION,
        "stages": [fact for stage, folder in stages.items() if (fact := _facts(stage, folder)) is not None],
        "trajectories": trajectories,
        "packed": packed,
        "decoded": decoded,
        "texts": _texts(stages["prompts"], shown),
    }
    artifacts.write_json(output / "excerpts.json", found)
    return {"stages": len(found["stages"]), "seconds_of_all": sum(fact["seconds"] for fact in found["stages"])}


def _of_rounds(stages: Mapping[str, Path], kind: str) -> list[tuple[str, Path]]:
    """(round, folder), the first round first."""
    found = [(name.partition("/")[0], folder) for name, folder in stages.items() if name.startswith("round") and name.endswith(f"/{kind}")]
    return sorted(found, key=lambda named: int(named[0].removeprefix("round")))


def _kept(round_: str, folder: Path, excerpt: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"round": round_, **excerpt(folder)}
    except (UserError, OSError) as error:
        return {"round": round_, "missing": f"It cannot be shown: {error}"}


def _trajectory(folder: Path) -> dict[str, Any]:
    """The typical block of the first answers: of those that are full (or of all) one that took the median number of forwards, and of these the
    one with the most right but unaccepted tokens. Its states, the fixed point last, without those that change nothing of the positions kept."""
    parts = trajectory_files.trajectory_parts(folder)
    if not parts:
        return {"missing": "The stage holds no trajectory: every prompt was dropped or quarantined."}
    if trajectory_files.read_metadata(parts[0]).get("collect") == "schedule":
        return {"missing": "Of every block only the state that its noise schedule asks for was kept (trajectories.collect=schedule)."}
    rows = list(trajectory_files.read_rows(parts[0]))[:CANDIDATES]
    blocks = [(row, number, states) for row in rows for number, states in enumerate(row.states)]
    blocks = [block for block in blocks if block[2].shape[1] == block[0].block_size] or blocks
    if not blocks:
        return {"missing": f"{parts[0].name} holds no trajectory: every prompt of its shard was dropped or quarantined."}
    median = int(np.median([len(states) - 1 for _, _, states in blocks]))
    nearest = min((len(states) - 1 for _, _, states in blocks), key=lambda forwards: abs(forwards - median))
    row, number, states = max((block for block in blocks if len(block[2]) - 1 == nearest), key=lambda block: _early(block[2]))
    kept = states[:, :MOST_POSITIONS]
    last = int(np.argmax((kept == kept[-1]).all(axis=1)))  # the first state from which on no position kept is wrong
    return {
        "prompt_id": int(row.id),
        "answers": len(rows),
        "blocks": len(blocks),
        "block": number,
        "block_size": int(row.block_size),
        "forwards": len(states) - 1,
        "states": kept[: last + 1].tolist(),
    }


def _early(states: np.ndarray) -> int:
    """Tokens that are right before they are accepted, over all states."""
    right = states == states[-1]
    return int((right & ~np.logical_and.accumulate(right, axis=1)).sum())


def _packed(folder: Path) -> dict[str, Any]:
    rows = PackedRows(folder / "packed.parquet")
    if not len(rows):
        return {"missing": "No sample fitted into a row."}
    fields = {name: values.tolist() for name, values in rows.first().items()}
    return {"rows": len(rows), "window_blocks": rows.window, "max_length": rows.max_length, **fields}


def _decoded(model: str, folder: Path) -> Iterable[dict[str, Any]]:
    """The first timed prompt, alone, under every setting: tokens that each forward committed."""
    first = completion_files.part_file(folder, "speed", 0)
    try:
        alone = [c for c in completion_files.read_part(first) if c.batch_size == 1] if first.exists() else []
    except UserError:
        return
    for c in alone:
        if c.id == alone[0].id:
            yield {"model": model, "method": c.method, "block_size": c.block_size, "prompt_id": c.id, "accepted_lengths": c.accepted_lengths}


def _facts(stage: str, folder: Path) -> dict[str, Any] | None:
    """Of a stage's manifest, under the id that it has in this run; None where it was made without one."""
    file = folder / "manifest.json"
    if not file.exists():
        return None
    manifest = artifacts.read_json(file)
    return {name: manifest.get(name) for name in _FACTS} | {"stage": stage, "folder": folder.name}


def _texts(prompts: Path, tokens: Iterable[int]) -> dict[str, str] | None:
    """Token id -> text, by the run's tokenizer; None where it has no file of its own, and ids are shown."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(prompts / "tokenizer" / "tokenizer.json"))
    except Exception:  # the library raises a bare one
        return None
    return {str(token): tokenizer.decode([token], skip_special_tokens=False) for token in sorted(tokens)}
