"""The results in the shape of the paper's Tables 1 and 2, and its accuracy under parallelism (AUP). Standard library only.

Takes rows of `results.json` and never changes one: every line of the table is a row, of the best block size of a model and method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from dashboards.table import Columns, Row, number, solved


class Reference(str, Enum):
    """Methods of rows that are not our decoder's: other people's decoders of the same model, timed beside ours."""

    transformers = "transformers"  # its own greedy generate()
    prompt_lookup = "prompt_lookup"  # its assisted generation from the prompt's n-grams; one prompt at a time


REFERENCES = tuple(reference.value for reference in Reference)
_METHODS = {"ar": "AR", "jacobi": "Jacobi", "mr": "MR", "prompt_lookup": "prompt lookup", "transformers": "transformers' generate()"}
_BASELINES = ("ar", *REFERENCES)  # once, of the base: training is not about them
AUP_ALPHA = 3.0  # how fast lost accuracy devalues parallelism
AUP_MOST_LOST = 0.05  # settings that lose more accuracy than this against the first one do not count

PAPER: Columns = [
    ("benchmark", lambda row: str(row["benchmark"]), True),
    ("method", lambda row: title(row), True),
    ("block", number("block_size", "d"), False),
    ("TPF", number("tpf", ".2f"), False),
    ("TPS", number("tps", ",.1f"), False),
    ("speedup", number("speedup", ".2f"), False),
    ("vs transformers", number("speedup_transformers", ".2f"), False),
    ("vs prompt lookup", number("speedup_prompt_lookup", ".2f"), False),
    ("accuracy", lambda row: "-" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f}", False),
    ("solved", solved, False),
]
THEIRS: Columns = [  # of `paper_numbers.paper_lines`
    ("benchmark", lambda row: str(row["benchmark"]), True),
    ("method", lambda row: str(row["method"]), True),
    *(column for column in PAPER if column[0] in ("TPF", "TPS", "speedup", "accuracy")),
]
PAPER_LEGEND = (
    "One prompt at a time; of each model and method the block size with the most tokens per second. speedup: over greedy AR of the same model in the "
    "same process (the paper's is over its AR baseline)."
)
AUP_LEGEND = (
    "AUP, accuracy under parallelism as d3LLM defines it: the area under accuracy (in %) against TPF over a model's settings, from the slowest "
    "(greedy AR, TPF 1) on, each accuracy y weighted by min(1, exp(-"
    f"{AUP_ALPHA:g} (1 - y / best accuracy of any model here))); settings that lose more than {100 * AUP_MOST_LOST:g} points against the slowest are "
    "left out. Our decoders return greedy AR's tokens: a model's line is level, its AUP its weighted accuracy times its highest TPF (but for the "
    "first token, which the definition does not weigh)."
)


def title(row: Row) -> str:
    """What a line of the paper's tables is called."""
    model, method = str(row["model"]), str(row["method"])
    kind, *knobs = method.partition(" (")  # "mr (K=3)": with a knob turned
    how = "".join([_METHODS.get(kind, kind.replace("_", " ")), *knobs])
    if model == "base":
        return how
    number = model.removeprefix("round")
    name = f"Jacobi Forcing, round {number}" if number.isdecimal() else "CLLM*" if model == "cllm" else model
    return name if method == "jacobi" else f"{name} ({how})"


def paper_rows(rows: Sequence[Row]) -> list[Row]:
    """The lines, benchmark by benchmark: the base's decoders, then the baselines that were trained, then the rounds, each without and with MR."""
    rows = [row for row in rows if row["batch_size"] == 1]
    has_base = {row["benchmark"] for row in rows if row["model"] == "base"}
    best: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if row["method"] in _BASELINES and row["model"] != "base" and row["benchmark"] in has_base:
            continue
        key = (row["benchmark"], row["model"], row["method"])
        if key not in best or row["tps"] > best[key]["tps"]:
            best[key] = row
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in rows))
    return sorted(best.values(), key=lambda row: (benchmarks.index(row["benchmark"]), _model_rank(row["model"]), _method_rank(row["method"])))


def _model_rank(model: str) -> tuple[int, int, str]:
    number = model.removeprefix("round")
    return (0, 0, "") if model == "base" else (2, int(number), "") if number.isdecimal() else (1, 0, model)


def _method_rank(method: str) -> tuple[int, str]:
    order = [*_BASELINES, "jacobi"]
    return (order.index(method), "") if method in order else (len(order) + method.startswith("mr"), method)


def parallelism(rows: Sequence[Row]) -> list[dict]:
    """Per model and benchmark `{model, benchmark, points: [[TPF, accuracy], ...], aup}`, of our decoders at batch size 1; none without accuracy.

    points: the best accuracy of every TPF, slowest first.
    """
    rows = [r for r in rows if r["batch_size"] == 1 and r["accuracy"] is not None and r["method"] not in REFERENCES]
    found = []
    for model, benchmark in dict.fromkeys((r["model"], r["benchmark"]) for r in rows):
        best = max(r["accuracy"] for r in rows if r["benchmark"] == benchmark)
        points: dict[float, float] = {}
        for r in rows:
            if (r["model"], r["benchmark"]) == (model, benchmark):
                points[r["tpf"]] = max(r["accuracy"], points.get(r["tpf"], 0.0))
        ordered = sorted(points.items())
        found.append({"model": model, "benchmark": benchmark, "points": [list(p) for p in ordered], "aup": aup(ordered, best)})
    return found


def aup(points: Sequence[tuple[float, float]], best: float) -> float:
    """Accuracy under parallelism, see AUP_LEGEND. points: (TPF, accuracy of 0 to 1), by rising TPF; best: the accuracy that weighs 1."""
    kept = [(x, y) for x, y in points if y >= points[0][1] - AUP_MOST_LOST]
    weighted = [y * min(1.0, math.exp(-AUP_ALPHA * (1 - y / best))) if best else 0.0 for _, y in kept]
    area = kept[0][0] * kept[0][1]
    for i in range(1, len(kept)):
        area += (kept[i][0] - kept[i - 1][0]) * (weighted[i] + weighted[i - 1]) / 2
    return 100 * area


AUP: Columns = [
    ("benchmark", lambda row: str(row["benchmark"]), True),
    ("model", lambda row: str(row["model"]), True),
    ("settings", lambda row: str(len(row["points"])), False),
    ("highest TPF", lambda row: f"{row['points'][-1][0]:.2f}", False),
    ("AUP", number("aup", ".1f"), False),
]
