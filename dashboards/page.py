"""A run's results as one self-contained HTML page: opens from a file, offline; Plotly's script is embedded once.

Takes the content of `results.json`, the training curves and the text samples; reads and writes no file.
Everything that came from a model or a data set is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboards.figures import accuracy_under_parallelism, latency, speed_accuracy, tpf_by_block_size, training_curves
from dashboards.figures.style import described
from dashboards.paper_table import AUP_LEGEND, PAPER, PAPER_LEGEND, REFERENCES, paper_rows
from dashboards.table import (
    COLUMNS,
    LEGEND,
    SPREAD,
    SPREAD_LEGEND,
    STOPS,
    STOPS_LEGEND,
    TRIALS,
    html_table,
    small_sample_notes,
    timed_on,
    unjudged_notes,
    version_notes,
)

Record = Mapping[str, Any]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2em; border-bottom: 1px solid #ccc; } .note { color: #555; font-size: 14px; }
figure { margin: 0; } figcaption { color: #555; font-size: 14px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; } th { border-bottom: 2px solid #888; }
.left { text-align: left; } pre { background: #f6f6f6; padding: 8px; margin: 0; font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1em; margin: 6px 0 2em; } .pair b { font-size: 13px; }
"""


def results_page(results: Record, *, curves: Sequence[Record], samples: Sequence[Record]) -> str:
    """The whole page.

    Args:
        results: the content of `results.json`.
        curves: logged training steps, `{model, step, loss, consistency, ar, learning_rate, tokens}`; empty where nothing was trained.
        samples: decoded answers, `{model, benchmark, problem_id, prompt, ar, jacobi, judged_by, passed}`; the last two None where nothing tells right
            from wrong.
    """
    rows = results["rows"]
    title = f"Jacobi Forcing: {results['experiment']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _machine(results),
        "<h2>Results</h2>",
        f"<div class=wide>{html_table(paper_rows(rows), PAPER)}</div><p class=note>{escape(PAPER_LEGEND)}</p>",
        *(f"<p class=note>{escape(note)}</p>" for note in [*version_notes(rows), *small_sample_notes(rows), *unjudged_notes(rows)]),
        _differences(rows, results["differences"]),
        "<h2>Figures</h2>",
        *_figures([row for row in rows if row["batch_size"] == 1 and row["method"] not in REFERENCES], curves),
        *_parallelism(results["parallelism"]),
        *_machine_figures(results.get("latency"), results.get("search")),
        "<h2>All settings</h2>",
        *(
            f"<h3>{name}</h3><div class=wide>{html_table(rows, columns)}</div><p class=note>{escape(legend)}</p>"
            for name, columns, legend in (
                ("Totals", COLUMNS, LEGEND),
                ("Spread, other decoders, prefill", SPREAD, SPREAD_LEGEND),
                ("Stops and loops", STOPS, STOPS_LEGEND),
            )
        ),
        "<h2>Samples</h2>",
        *(_sample(sample) for sample in samples),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script>'
    return "\n".join(['<!DOCTYPE html>\n<html lang="en">', f"<head>{head}</head>", "<body>", *body, "</body>", "</html>"])


def _machine(results: Record) -> str:
    hardware = results["hardware"]
    facts = [
        f"revision {results['git_sha'][:12]}",
        str(hardware["cpu"]),
        f"{hardware['cores']} cores",
        f"{hardware['memory_gb']:.0f} GB memory",
        "GPU: " + (", ".join(hardware["gpus"]) if hardware["gpus"] else "none"),
        str(hardware["platform"]),
    ]
    lines = [" · ".join(facts) + " (the machine that wrote this report)", *timed_on(results["timed_on"])]
    return "".join(f"<p class=note>{escape(line)}</p>" for line in lines)


def _differences(rows: Sequence[Record], differences: Sequence[Record]) -> str:
    if not differences and all(row["equals_ar"] == 1 for row in rows):
        return "<p>Every output compared was equal, token for token, to greedy AR of the same model.</p>"
    columns = ["model", "benchmark", "problem_id", "method", "block_size", "batch_size", "first_index", "margin", "kind"]
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in columns)
    lines = ("<tr>" + "".join(f"<td>{escape(str(difference[column]))}</td>" for column in columns) + "</tr>" for difference in differences)
    note = (
        "Outputs that differ from greedy AR of the same model, each with the first differing token and AR's top-2 logit margin there: "
        "a tie is rounding between two equally likely tokens, a defect is not."
    )
    return f"<h3>Differences</h3><p class=note>{note}</p><div class=wide><table><tr>{head}</tr>{''.join(lines)}</table></div>"


def _figures(rows: Sequence[Record], curves: Sequence[Record]) -> list[str]:
    frame = pd.DataFrame(rows)
    parts = []
    for benchmark, group in frame.groupby("benchmark", sort=False):
        counts = f"{group['prompts'].max():,} prompts of {benchmark}, batch size {group['batch_size'].min()}"
        parts += [
            figure_html(
                speed_accuracy(group),
                f"Speed and accuracy, {benchmark}",
                f"Each point is one decoding setting (its block size, or AR) of one model; speed measured over {counts}.",
            ),
            figure_html(
                tpf_by_block_size(group),
                f"Tokens per forward, {benchmark}",
                f"Committed tokens over forward passes, prefill counted, totals over {counts}; it does not depend on the machine.",
            ),
        ]
    if curves:
        note = "Loss terms of every logged optimizer step, each averaged over the tokens it counts in the global batch."
        parts.append(figure_html(training_curves(pd.DataFrame(curves)), "Distillation", note))
    return parts


def _parallelism(curves: Sequence[Record]) -> list[str]:
    if not curves:
        return []
    frame = pd.DataFrame(curves)
    return [
        figure_html(accuracy_under_parallelism(group), f"Accuracy under parallelism, {benchmark}", AUP_LEGEND)
        for benchmark, group in frame.groupby("benchmark", sort=False)
    ]


def _machine_figures(measured: Record | None, search: Record | None) -> list[str]:
    """What was found out about this machine, where that was asked for."""
    parts = []
    if measured:
        note = (
            f"A forward over m tokens, {measured['dtype']}, the quickest of five. Free: as many as take at most {measured['free_ratio']:g} times as "
            "long as one."
        )
        parts.append(figure_html(latency(measured["curves"]), "Latency of a forward", note))
    if search:
        tables = (("Finalists, on the split searched on", search["rounds"][-1]), ("On held-out prompts", search["heldout"]))
        parts.append(f"<h3>Fastest decoding setting of {escape(search['model'])}: {escape(search['winner'])}</h3>")
        parts += [f"<p class=note>{name}</p><div class=wide>{html_table(trials, TRIALS)}</div>" for name, trials in tables]
    return parts


def figure_html(figure: go.Figure, title: str, note: str) -> str:
    return f"<h3>{escape(title)}</h3>{described(figure, title, note)}"


_JUDGED = {
    ("tests", True): "tests passed",
    ("tests", False): "tests failed",
    ("answer", True): "answer right",
    ("answer", False): "answer wrong",
    (None, None): "nothing to judge it by",
}


def _sample(sample: Record) -> str:
    heading = f"{sample['model']} · {sample['benchmark']} · {sample['problem_id']}"
    verdict = "same text" if sample["ar"] == sample["jacobi"] else "texts differ"
    judged = _JUDGED[sample["judged_by"], sample["passed"]]
    answers = "".join(f"<div><b>{name}</b><pre>{escape(sample[key])}</pre></div>" for name, key in (("greedy AR", "ar"), ("Jacobi", "jacobi")))
    prompt = f"<details><summary>prompt</summary><pre>{escape(sample['prompt'])}</pre></details>"
    return f"<h3>{escape(heading)}</h3><p class=note>{verdict}, {judged}</p>{prompt}<div class=pair>{answers}</div>"
