"""The last stage: gathers what evaluation and training wrote into `results.json`, `results.md` and `report.html`.

Computes no new measurement; `results.json` is the contract other tools read. Pictures and tables are made in `dashboards/`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from tasks.machine import git_sha, machine
from tasks.stage import StageContext

if TYPE_CHECKING:
    import numpy as np

    from dashboards.report_figures import Evidence, Shown

SCHEMA_VERSION = 1
VERSIONS = ("torch", "transformers", "ray")  # where the report is made
MASK_TOKENS, MASK_PROMPT = 256, 24  # drawn of a mask, at most: all, and of the prompt before the first block
_DRAFTED_ALONE = re.compile(r"[^@]+@\d+")  # "method@block_sizexBATCH" are batches
FIGURES = "figures"  # folder of the figures of the page, each as Plotly's JSON

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
    """Write `results.json`, `results.md`, `report.html` and every figure of it as `figures/<name>.json` into `output`.

    Args:
        inputs: `evaluate/<model>` folders, of benchmarks beside the prompts of `data` `evaluate/<model>/<benchmark>`, with `evaluation.json`,
            `distill/<model>` folders with `training.json`, and `export/final`, the checkpoint of the last round; where there are, `latency`
            with `latency.json`, `search` with `search.json` and `excerpts` with `excerpts.json`.

    Returns:
        Per model and benchmark the accuracy and the best speedup and TPF of any decoding setting; counts of rows, ties and defects.
    """
    from dashboards.page import results_page
    from dashboards.report_figures import report_figures

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
        "hardware": machine(),
        "versions": {name: version(name) for name in VERSIONS},
        "timed_on": _timed_on(evaluations.values()),
        "final_model": str(inputs["export/final"].resolve()),
        "rows": rows,
        "differences": _labelled(evaluations.values(), "differences"),
        "parallelism": parallelism(rows),
        **{name: read_json(inputs[name] / f"{name}.json") for name in ("latency", "search") if name in inputs},
    }
    write_json(output / "results.json", results)
    write_text(output / "results.md", _markdown(results))
    evidence = _evidence(inputs, evaluations.values(), trainings)
    shown = report_figures(results, evidence)
    write_text(output / "report.html", results_page(results, evidence, shown))
    write_figures(output, [part for section in shown.values() for part in section])
    return _metrics(results)


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The results table for a terminal: result rows in, aligned text of about 135 columns out, notes below. One prompt at a time only: what is
    measured of batches stands in results.md."""
    alone = [row for row in rows if row["batch_size"] == 1]
    notes = [textwrap.fill(note, width=135) for note in (LEGEND, *version_notes(alone), *small_sample_notes(alone), *unjudged_notes(alone))]
    return "\n".join([text_table(alone), "", *notes])


def _evidence(inputs: Mapping[str, Path], evaluations: Collection[Mapping[str, Any]], trainings: Mapping[str, Any]) -> Evidence:
    """What the page shows beside the results. What earlier versions of a stage did not write is absent."""
    from dashboards.report_figures import Evidence

    excerpts = read_json(inputs["excerpts"] / "excerpts.json") if "excerpts" in inputs else {}
    told = {key: [{"model": model} | point for model, found in trainings.items() for point in found.get(key) or ()] for key in ("curves", "probes")}
    variant = next((found["config"]["mask"] for found in trainings.values() if "config" in found), "nc")
    accepted = [
        {"model": part["model"], "benchmark": part["benchmark"], "setting": setting, "forwards": forwards}
        for part in evaluations
        for setting, forwards in part.get("accepted_lengths", {}).items()
        if _DRAFTED_ALONE.fullmatch(setting) and setting.partition("@")[0] not in ("ar", *REFERENCES)
    ]
    first, visible = _mask(excerpts, variant)
    return Evidence(**told, accepted=accepted, samples=_labelled(evaluations, "samples"), excerpts=excerpts, visible=visible, first=first)


def _mask(excerpts: Mapping[str, Any], variant: str) -> tuple[int, np.ndarray | None]:
    """Of the last round's packed excerpt: the first token drawn and, from there on, who may see whom, by the rule that training uses. Of a long
    prompt only the end, which shows all there is to see of one."""
    import numpy as np

    from jacobi_core.distillation.attention_variant import MaskVariant
    from jacobi_core.distillation.visibility import TokenFields, visible

    packed = (excerpts.get("packed") or [{}])[-1]
    if "input_ids" not in packed:
        return 0, None
    answer = next((i for i, block in enumerate(packed["block"]) if block >= 0), 0)
    first = max(0, answer - MASK_PROMPT)
    drawn = slice(first, first + MASK_TOKENS)
    fields = TokenFields(*(np.array(packed[name][drawn]) for name in TokenFields._fields))
    mask = visible(queries=fields.map(lambda f: f[:, None]), keys=fields.map(lambda f: f[None, :]), variant=MaskVariant(variant))
    return first, mask


def write_figures(folder: Path, shown: Iterable[Shown]) -> None:
    """Every figure of a page as `figures/<name>.json` (`plotly.io.read_json` opens it), with its title and its data in words; and no other there."""
    (folder / FIGURES).mkdir(exist_ok=True)
    for old in (folder / FIGURES).glob("*.json"):
        old.unlink()
    for part in shown:
        if part.figure is not None:
            part.figure.update_layout(meta={"title": part.title, "caption": part.note})
            name = re.sub(r"[^\w-]+", "_", part.name)  # a benchmark may be called as its users like
            write_text(folder / FIGURES / f"{name}.json", part.figure.to_json())


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
