"""The last stage: gathers what evaluation and training wrote into `results.json`, `results.md` and `report.html`.

Computes no new measurement; `results.json` is the contract other tools read. Pictures and tables are made in `dashboards/`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboards.paper_table import AUP, AUP_LEGEND, PAPER, PAPER_LEGEND, REFERENCES, paper_rows, parallelism
from dashboards.table import (
    LEGEND,
    SPREAD,
    SPREAD_LEGEND,
    STOPS,
    STOPS_LEGEND,
    TRIALS,
    markdown_table,
    small_sample_notes,
    text_table,
    timed_on,
    unjudged_notes,
    version_notes,
)
from tasks.artifacts import read_json, write_json, write_text
from tasks.stage import StageContext

SCHEMA_VERSION = 1

# fmt: off
ROW_KEYS = {
    "model", "benchmark", "method", "block_size", "batch_size", "dtype", "prompts", "tokens", "forwards", "seconds", "tpf", "tps", "speedup",
    "accuracy", "accuracy_prompts", "train_tokens", "stop_reasons", "equals_ar",
}
# fmt: on


@dataclass
class ReportConfig:
    """Settings of the report stage."""

    experiment: str  # name the results are filed under


def run(config: ReportConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """Write `results.json`, `results.md` and `report.html` into `output`.

    Args:
        inputs: `evaluate/<model>` folders, of benchmarks beside the prompts of `data` `evaluate/<model>/<benchmark>`, with `evaluation.json`,
            `distill/<model>` folders with `training.json`, and `export/final`, the checkpoint of the last round; where there are, `latency`
            with `latency.json` and `search` with `search.json`.

    Returns:
        Per model and benchmark the accuracy and the best speedup and TPF of any decoding setting; counts of rows, ties and defects.
    """
    from dashboards.page import results_page

    evaluations = _read(inputs, "evaluate", "evaluation.json")
    trainings = _read(inputs, "distill", "training.json")
    rows = [row for evaluation in evaluations.values() for row in evaluation["rows"]]
    for row in rows:
        assert row.keys() >= ROW_KEYS, f"a result row lacks {sorted(ROW_KEYS - row.keys())}"
        assert not any(value != value for value in row.values()), "a result row holds NaN, which is no JSON; an absent number is None"

    results = {
        "schema_version": SCHEMA_VERSION,
        "experiment": config.experiment,
        "git_sha": git_sha(),
        "hardware": hardware(),
        "timed_on": _timed_on(evaluations.values()),
        "final_model": str(inputs["export/final"].resolve()),
        "rows": rows,
        "differences": _labelled(evaluations.values(), "differences"),
        "parallelism": parallelism(rows),
        **{name: read_json(inputs[name] / f"{name}.json") for name in ("latency", "search") if name in inputs},
    }
    curves = [{"model": model} | point for model, training in trainings.items() for point in training["curves"]]
    write_json(output / "results.json", results)
    write_text(output / "results.md", _markdown(results))
    page = results_page(results, curves=curves, samples=_labelled(evaluations.values(), "samples"))
    write_text(output / "report.html", page)
    return _metrics(results)


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The results table for a terminal: result rows in, aligned text of about 135 columns out, notes below. One prompt at a time only: what is
    measured of batches stands in results.md."""
    alone = [row for row in rows if row["batch_size"] == 1]
    notes = [textwrap.fill(note, width=135) for note in (LEGEND, *version_notes(alone), *small_sample_notes(alone), *unjudged_notes(alone))]
    return "\n".join([text_table(alone), "", *notes])


def _read(inputs: Mapping[str, Path], kind: str, file: str) -> dict[str, dict[str, Any]]:
    """`file` of every input `kind/<model>` and `kind/<model>/<benchmark>`: base first, then the rounds by number, then the baselines; of each model
    the benchmarks in the order of `inputs`."""
    wanted = sorted((name.partition("/")[2] for name in inputs if name.startswith(f"{kind}/")), key=lambda name: _model_order(name.partition("/")[0]))
    return {name: read_json(inputs[f"{kind}/{name}"] / file) for name in wanted}


def _model_order(model: str) -> tuple[int, int, str]:
    if model == "base":
        return 0, 0, model
    number = model.removeprefix("round")
    return (1, int(number), model) if number.isdecimal() else (2, 0, model)


def _labelled(evaluations: Iterable[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """The entries under `key` of every evaluation, each with the model and benchmark it belongs to."""
    return [{"model": part["model"], "benchmark": part["benchmark"]} | entry for part in evaluations for entry in part[key]]


def _timed_on(evaluations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every machine that speed was measured on, with its models."""
    found: list[dict[str, Any]] = []
    for part in evaluations:
        same = next((entry for entry in found if entry["machine"] == part["machine"]), None)
        if same is None:
            found.append({"models": [part["model"]], "machine": part["machine"]})
        elif part["model"] not in same["models"]:
            same["models"].append(part["model"])
    return found


def _markdown(results: Mapping[str, Any]) -> str:
    rows = results["rows"]
    parts = [
        f"`{results['experiment']}` at {results['git_sha'][:12]}. {' '.join(timed_on(results['timed_on']))}",
        "## As in the paper's Tables 1 and 2",
        markdown_table(paper_rows(rows), PAPER),
        PAPER_LEGEND,
        *version_notes(rows),
        *small_sample_notes(rows),
        *unjudged_notes(rows),
        "## All settings",
        markdown_table(rows),
        LEGEND,
        "## Speed: spread, other decoders, prefill",
        markdown_table(rows, SPREAD),
        SPREAD_LEGEND,
        "## Stops and loops",
        markdown_table(rows, STOPS),
        STOPS_LEGEND,
    ]
    if results["parallelism"]:
        parts += ["## Accuracy under parallelism", markdown_table(results["parallelism"], AUP), AUP_LEGEND]
    if "search" in results:
        search = results["search"]
        parts += [
            f"## Fastest decoding setting of {search['model']}: {search['winner']}",
            "The finalists, on the split searched on:",
            markdown_table(search["rounds"][-1], TRIALS),
            "On held-out prompts:",
            markdown_table(search["heldout"], TRIALS),
        ]
    return "\n\n".join(parts) + "\n"


def _metrics(results: Mapping[str, Any]) -> dict[str, float]:
    kinds = [difference["kind"] for difference in results["differences"] if difference["method"] not in REFERENCES]
    metrics: dict[str, float] = {"rows": len(results["rows"]), "ties": kinds.count("tie"), "defects": kinds.count("defect")}
    metrics |= {f"{found['model']}/{found['benchmark']}/aup": found["aup"] for found in results["parallelism"]}
    for row in results["rows"]:
        prefix = f"{row['model']}/{row['benchmark']}"
        if row["accuracy"] is not None:
            metrics[f"{prefix}/accuracy"] = row["accuracy"]
        if row["batch_size"] > 1 or row["method"] in REFERENCES:
            continue
        for key in ("tpf", "speedup"):
            metrics[f"{prefix}/best_{key}"] = max(row[key], metrics.get(f"{prefix}/best_{key}", 0.0))
    return metrics


def git_sha() -> str:
    """Commit of the source tree this file belongs to; "unknown" for an installed copy, outside git, or before the first commit."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        # An installed copy may lie inside somebody else's repository: only one that tracks this very file counts.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware() -> dict[str, Any]:
    """The machine this process runs on; `gpus` is None without CUDA, memory in GB of 10^9 bytes."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)] or None,
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def cpu_model() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
