"""A finished run or sweep as it can be committed: its numbers and settings, with nothing of the machine's places, names or of any text decoded.

Takes only keys that are named here. What `results.json` does not hold is read from `job.json` beside it and, where the run's store is still there,
from its stages; it goes under `made`. A copy read again is the same copy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dashboards.sweep import last_model
from pipelines.job_record import JOB
from pipelines.store import MANIFEST
from pipelines.sweep_jobs import COMMAND
from tasks.artifacts import read_json
from tasks.stage import UserError

DIGITS = 6  # significant
# fmt: off
ROW_NAMES = ("model", "benchmark", "method", "dtype")
ROW_COUNTS = ("block_size", "batch_size", "tpf", "tps", "speedup", "equals_ar", "train_tokens")  # a number in every row
ROW_OTHERS = (
    "benchmark_version", "prompts", "tokens", "forwards", "seconds", "accuracy", "accuracy_prompts", "unjudged", "stop_reasons", "degenerate",
    "sound_tpf", "speedup_transformers", "speedup_prompt_lookup",
)
MACHINE = ("cpu", "cores", "torch", "torch_threads", "device")
DIFFERENCE = ("model", "benchmark", "problem_id", "method", "block_size", "batch_size", "first_index", "margin", "kind")
SWEEP_ROW = (
    "number", "settings", "trained_model", "benchmark", "tpf", "tpf_interval", "timed_prompts", "speedup", "accuracy", "accuracy_prompts",
    "train_tokens", "equals_ar", "loops", "noise", "paper",
)
# fmt: on
SWEEP_NEEDED = ("number", "settings", "benchmark", "tpf", "tpf_interval", "equals_ar")
PLACES = ("paths.", "tracking.", "hydra.", "cluster.address")  # settings that say where, not what
_FOLDER = re.compile(r"(?:\b[a-z][a-z0-9+]*:/|~)?(?:/[^/\s,:;\[\]{}\"']+)+/")
_OWN = re.compile(r"jacobi@\d+")  # drafted alone: "method@block_sizexBATCH" are batches


def run_copy(path: Path) -> dict[str, Any]:
    """Of a `results.json`. Raises UserError, one line naming it, for anything else."""
    found = read_json(path)
    if wrong := _mistake(found):
        raise UserError(f"runs={path}: is no results.json of a run ({wrong})")
    with _named(f"runs={path}"):
        return _plain(
            {
                "schema_version": 1,
                "experiment": str(found["experiment"]),
                "git_sha": str(found["git_sha"]) if found.get("git_sha") else None,
                "timed_on": [_timed(entry) for entry in found.get("timed_on", ())],
                "versions": dict(found.get("versions", {})),
                "rows": [_only(row, (*ROW_NAMES, *ROW_COUNTS, *ROW_OTHERS)) for row in found["rows"]],
                "differences": [_flat(entry, DIFFERENCE) for entry in found.get("differences", ())],
                "made": found.get("made") or _made(path.parent / JOB, found["rows"]),
            }
        )


def sweep_copy(path: Path) -> dict[str, Any]:
    """Of a `sweep.json` of the paper's Table 4 or 5. Raises UserError, one line naming it, for anything else."""
    found = read_json(path)
    if not (isinstance(found, dict) and isinstance(found.get("rows"), list) and "paper" in found):
        raise UserError(f"sweeps={path}: is no sweep.json")
    if found["paper"] not in ("table4", "table5"):
        raise UserError(
            f"sweeps={path}: is no sweep of the paper's Table 4 or 5 (experiment=ablate_noise, experiment=ablate_mask); give its jobs as runs="
        )
    with _named(f"sweeps={path}"):
        rows = [_only(row, SWEEP_ROW) | {"error": "no results" if row["error"] else None} for row in found["rows"]]
        lacking = [key for row in rows or [{}] for key in SWEEP_NEEDED if key not in row]
        if lacking or not all(_is_number(tpf) for row in rows for tpf in row["tpf"].values()):
            raise ValueError(f"a row lacks {(lacking or ['a number in tpf'])[0]}")
        for row in rows:
            _flat(row, ("benchmark",))
        made = found.get("made") or _sweep_made(path.parent)
        return _plain({"schema_version": 1, "paper": found["paper"], "shared": _settings(found["shared"]), "rows": rows, "made": made})


@contextmanager
def _named(what: str) -> Iterator[None]:
    """A file of another form than the pipeline writes is the user's mistake, said in one line."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{what}: is not as the pipeline writes it ({type(error).__name__}: {error})") from error


def text_of(copy: Mapping[str, Any]) -> str:
    """As JSON, a line per row."""
    lines = [json.dumps(row, ensure_ascii=False) for row in copy["rows"]]
    head = json.dumps({key: value for key, value in copy.items() if key != "rows"}, indent=1, ensure_ascii=False)
    return head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def _mistake(found: Any) -> str | None:
    """What is wrong with the content of a results.json."""
    if not (isinstance(found, dict) and "experiment" in found and isinstance(found.get("rows"), list)):
        return "it has no experiment or no rows"
    if found.get("schema_version") != 1:
        return f"its schema_version is {found.get('schema_version')!r}, expected 1"
    if not found["rows"]:
        return "it has no rows"
    for number, row in enumerate(found["rows"]):
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ROW_NAMES):
            return f"row {number} lacks a text in {', '.join(ROW_NAMES)}"
        wrong = [key for key in ROW_COUNTS if not _is_number(row.get(key))]
        wrong += [key for key in ("accuracy", "accuracy_prompts") if row.get(key) is not None and not _is_number(row[key])]
        if wrong or row["tpf"] <= 0:
            return f"row {number} has no number in {wrong[0] if wrong else 'tpf'}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _made(job: Path, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What `job.json` and the stages it names tell; None or empty for what is not there any more."""
    record = read_json(job) if job.exists() else {}
    stages = {stage: Path(folder) for stage, folder in (record.get("stages") or {}).items()}
    manifests = {stage: read_json(folder / MANIFEST) for stage, folder in stages.items() if (folder / MANIFEST).is_file()}
    sized = [manifest["metrics"].get("parameters") for stage, manifest in manifests.items() if stage == "base" or stage.endswith("/export")]
    return {
        "seed": (record.get("config") or {}).get("seed"),
        "overrides": _settings(record.get("overrides")),
        "parameters": next(filter(None, sized), None),  # an imported base does not count them, its exports do
        "seconds": {stage.partition("/")[0]: manifest["seconds"] for stage, manifest in manifests.items() if stage.endswith("/distill")},
        "accepted": _accepted(stages, last_model(rows)),
        "probes": _probes(stages),
        "checkpoints": _checkpoints(manifests),
    }


def _sweep_made(folder: Path) -> dict[str, Any]:
    """How a sweep was called and, of its first job with results, by what."""
    command = read_json(folder / COMMAND) if (folder / COMMAND).exists() else {"overrides": None, "swept": []}
    job = next((run_copy(file) for file in sorted(folder.glob("*/results.json"))), {"git_sha": None, "timed_on": []})
    torch = ", ".join(dict.fromkeys(str(entry["machine"]["torch"]) for entry in job["timed_on"]))
    return {"overrides": _settings(command["overrides"]), "swept": bool(command["swept"]), "git_sha": job["git_sha"], "torch": torch or None}


def _accepted(stages: Mapping[str, Path], model: str | None) -> dict[str, dict[str, dict[str, int]]]:
    """By benchmark and setting: committed tokens per forward -> forwards."""
    found = {}
    for stage, folder in stages.items():
        file = folder / "evaluation.json"
        if stage.startswith(f"{model}/evaluate") and file.is_file():
            evaluation = read_json(file)
            found[evaluation["benchmark"]] = {name: counts for name, counts in evaluation.get("accepted_lengths", {}).items() if _OWN.fullmatch(name)}
    return found


def _probes(stages: Mapping[str, Path]) -> dict[str, list[dict[str, float]]]:
    """By model: step, packed tokens trained on until then, tokens per forward and share of unchanged greedy answers, while it was distilled."""
    import pandas as pd

    from dashboards.figures import probes_by_tokens

    found = {}
    for stage, folder in stages.items():
        file = folder / "training.json"
        if stage.endswith("/distill") and file.is_file():
            training, model = read_json(file), stage.partition("/")[0]
            probes, curves = (pd.DataFrame(training[key]).assign(model=model) for key in ("probes", "curves"))
            if len(probes):
                placed = probes_by_tokens(probes, curves).merge(probes[["step", "equal_to_teacher"]], on="step")
                found[model] = placed[["step", "tokens", "tpf", "equal_to_teacher"]].to_dict("records")
    return found


def _checkpoints(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """By model: sha256 of its files of weights."""
    exports = {stage.partition("/")[0]: manifest.get("hashes", {}) for stage, manifest in manifests.items() if stage.endswith("/export")}
    found = {model: {file: digest for file, digest in hashes.items() if file.endswith(".safetensors")} for model, hashes in exports.items()}
    return {model: weights for model, weights in found.items() if weights}


def _settings(overrides: list[str] | None) -> list[str] | None:
    return None if overrides is None else [text for text in overrides if not text.lstrip("+~").startswith(PLACES)]


def _only(entry: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: entry[key] for key in keys if key in entry}


def _flat(entry: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """All of these keys. Raises ValueError where one is more than a number or a text."""
    if nested := [key for key in keys if isinstance(entry[key], (list, dict))]:
        raise ValueError(f"{nested[0]} is no number or text")
    return {key: entry[key] for key in keys}


def _timed(entry: Mapping[str, Any]) -> dict[str, Any]:
    machine = entry["machine"]
    names = (*MACHINE, "threads_sleep") if "threads_sleep" in machine else MACHINE
    return {"models": [str(model) for model in entry["models"]], "machine": _flat(machine, names) | {"gpus": [str(gpu) for gpu in machine["gpus"]]}}


def _plain(value: Any) -> Any:
    """Numbers in DIGITS digits; of a path its last part, behind dots."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return _FOLDER.sub(".../", value) if isinstance(value, str) else value
