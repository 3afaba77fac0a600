"""Finished runs as one data frame: their result rows, each with its run, its group, how long its model was trained, and what differed from AR.

A run is the content of a `results.json` and, under `made`, what its store told of it:
    seed: int or None; overrides: list of str;
    parameters: of the base, or None;
    seconds: `{model: seconds of its distillation}`;
    accepted: of the last round, `{benchmark: {"jacobi@block size": {committed tokens: forwards}}}`;
    probes: `{model: [{step, tokens, tpf, equal_to_teacher}]}`; checkpoints: `{model: {file: sha256}}`.
Reads no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

Run = Mapping[str, Any]

_SETTING = ("model", "benchmark", "method", "block_size", "batch_size")
COLUMNS = (
    "run",
    "group",
    *_SETTING,
    "tpf",
    "tps",
    "speedup",
    "accuracy",
    "accuracy_prompts",
    "train_tokens",
    "minutes",
    "equals_ar",
    "ties",
    "defects",
)


def run_rows(runs: Mapping[str, Run]) -> pd.DataFrame:
    """All rows of all runs, by the runs' names; at least COLUMNS.

    group: what runs have in common that differ in their seed only: experiment, size of the base, benchmark. minutes: of all distillation since the
    base. ties, defects: prompts that differ from greedy AR.
    """
    frames = [_rows(name, run) for name, run in runs.items()]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))


def _rows(name: str, run: Run) -> pd.DataFrame:
    kinds = Counter((*(found.get(key) for key in _SETTING), found["kind"]) for found in run.get("differences", ()))
    added = [
        {
            "run": name,
            "group": group_name(run, row["benchmark"]),
            "minutes": _minutes(run["made"]["seconds"], row["model"]),
            "ties": kinds[(*(row[key] for key in _SETTING), "tie")],
            "defects": kinds[(*(row[key] for key in _SETTING), "defect")],
        }
        for row in run["rows"]
    ]
    return pd.DataFrame([row | more for row, more in zip(run["rows"], added, strict=True)])


def group_name(run: Run, benchmark: str) -> str:
    """E.g. "ladder (3.5M), minicode_long"; without the size where it is not known."""
    parameters = run["made"]["parameters"]
    return f"{run['experiment']}{f' ({size(parameters)})' if parameters else ''}, {benchmark}"


def size(parameters: int) -> str:
    """In two digits: 3,626,240 is 3.6M; seeds differ by a few entries of their vocabularies."""
    digits = int(float(f"{parameters:.2g}"))
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if digits >= unit:
            return f"{digits / unit:.2g}{name}" if digits < 100 * unit else f"{digits // unit}{name}"
    return str(digits)


def _minutes(seconds: Mapping[str, float], model: str) -> float | None:
    """A round starts from the one before it."""
    number = model.removeprefix("round")
    chain = [f"round{k}" for k in range(1, int(number) + 1)] if number.isdecimal() else [model]
    return sum(seconds[part] for part in chain) / 60 if all(part in seconds for part in chain) else None
