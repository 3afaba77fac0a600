"""A run's results as one self-contained HTML page: opens from a file, offline; Plotly's script is embedded once.

Takes the content of `results.json`, what else the run left and the figures; reads and writes no file.
Everything that came from a model or a data set is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from plotly.offline import get_plotlyjs

from dashboards.costs import costs
from dashboards.figures import described
from dashboards.paper_numbers import paper_lines
from dashboards.paper_table import PAPER, PAPER_LEGEND, THEIRS, paper_rows
from dashboards.report_figures import Evidence, Shown
from dashboards.table import (
    COLUMNS,
    LEGEND,
    SPREAD,
    SPREAD_LEGEND,
    STOPS,
    STOPS_LEGEND,
    TRIALS,
    Columns,
    html_table,
    small_sample_notes,
    timed_on,
    told,
    unjudged_notes,
    version_notes,
)

Record = Mapping[str, Any]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1360px; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2em; border-bottom: 1px solid #ccc; }
p, figcaption { max-width: 1180px; } .note { color: #555; font-size: 14px; }
figure { margin: 0; } figcaption { color: #555; font-size: 14px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; }
.left { text-align: left; } pre { background: #f6f6f6; padding: 8px; margin: 0; font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
.beside { display: flex; flex-wrap: wrap; gap: 0 1em; align-items: flex-start; } .beside > div { width: min-content; max-width: 100%; }
summary { cursor: pointer; } nav { margin: 1em 0; } a { color: #0b4f8a; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1em; margin: 6px 0 2em; } .pair b { font-size: 13px; }
"""


def results_page(results: Record, evidence: Evidence, shown: Mapping[str, Sequence[Shown]]) -> str:
    """The whole page.

    Args:
        results: the content of `results.json`.
        evidence: what else the run left.
        shown: section -> its figures (`report_figures`).
    """
    rows = results["rows"]
    title = f"Jacobi Forcing: {results['experiment']}"
    sections = {
        "Results": _results(rows, results),
        **{name: "".join(map(shown_html, figures)) for name, figures in shown.items()},
        "What was run, and what it took": costs(evidence.excerpts.get("stages", ())),
        "All settings": "".join(
            f"<h3>{name}</h3>{wide_table(rows, columns)}<p class=note>{escape(legend)}</p>"
            for name, columns, legend in (
                ("Totals", COLUMNS, LEGEND),
                ("Spread, other decoders, prefill", SPREAD, SPREAD_LEGEND),
                ("Stops and loops", STOPS, STOPS_LEGEND),
            )
        ),
        "Samples": _samples(evidence.samples),
    }
    sections["This machine"] += _search(results.get("search"))
    return whole_page(title, _machine(results), sections)


def failure_page(experiment: str, failures: Mapping[str, str], absent: Sequence[str], stages: Sequence[Record]) -> str:
    """In a report's place, of a run that did not reach it.

    Args:
        failures: stage -> what went wrong, in one line.
        absent: stages that were not run, or not to the end.
        stages: those that are finished, as in excerpts.json.
    """
    what = "".join(f"<h3>{escape(stage)}</h3><pre>{escape(why)}</pre>" for stage, why in failures.items())
    left = f"<p>Not run: {escape(', '.join(absent))}.</p>" if absent else ""
    kept = "<p class=note>What is finished is kept: the same command goes on from there.</p>"
    sections = {"What failed": what + left + kept, "What was run, and what it took": costs(stages)}
    return whole_page(f"Jacobi Forcing: {experiment}, failed", "", sections)


def whole_page(title: str, about: str, sections: Mapping[str, str]) -> str:
    """A self-contained page: what it is about, links to its sections, the sections; with Plotly's script where there is a figure."""
    names = [(f"s{number}", name) for number, name in enumerate(sections)]
    links = " · ".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name in names)
    body = [f"<h1>{escape(title)}</h1>", about, f"<nav>{links}</nav>"]
    body += [f"<h2 id={anchor}>{escape(name)}</h2>\n{sections[name]}" for anchor, name in names]
    script = f"<script>{get_plotlyjs()}</script>" if any("Plotly.newPlot(" in section for section in sections.values()) else ""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>{script}'
    return "\n".join(['<!DOCTYPE html>\n<html lang="en">', f"<head>{head}</head>", "<body>", *body, "</body>", "</html>"])


def _results(rows: Sequence[Record], results: Record) -> str:
    """Ours, and the paper's beside it."""
    lines, about = paper_lines(list(dict.fromkeys(row["benchmark"] for row in rows)))
    ours = f"<div>{wide_table(paper_rows(rows), PAPER)}<p class=note>{escape(PAPER_LEGEND)}</p></div>"
    theirs = f"<div>{wide_table(lines, THEIRS[len({line['benchmark'] for line in lines}) == 1 :])}<p class=note>{escape(about)}</p></div>"
    notes = [*version_notes(rows), *small_sample_notes(rows), *unjudged_notes(rows)]
    below = "".join(f"<p class=note>{escape(note)}</p>" for note in notes)
    return f"<div class=beside>{ours}{theirs}</div>{below}{_differences(rows, results['differences'])}"


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
    return f"<h3>Differences</h3><p class=note>{note}</p><div class=wide tabindex=0><table><tr>{head}</tr>{''.join(lines)}</table></div>"


def _search(search: Record | None) -> str:
    """What was found out about the fastest decoding on this machine, where that was asked for."""
    if not search:
        return ""
    tables = (("Finalists, on the split searched on", search["rounds"][-1]), ("On held-out prompts", search["heldout"]))
    shown = "".join(f"<p class=note>{name}</p>{wide_table(trials, TRIALS)}" for name, trials in tables)
    return f"<h3>Fastest decoding setting of {escape(search['model'])}: {escape(search['winner'])}</h3>{shown}"


def wide_table(rows: Sequence[Record], columns: Columns) -> str:
    """Of the columns that say something; scrolled, also by keys, where it is wider than the page."""
    return f"<div class=wide tabindex=0>{html_table(rows, told(rows, columns))}</div>"


def shown_html(shown: Shown) -> str:
    """A figure with its title and its data in words, or the sentence that stands in its place."""
    text = f"<p class=note>{escape(shown.note)}</p>" if shown.figure is None else described(shown.figure, shown.title, shown.note)
    return f"<h3>{escape(shown.title)}</h3>{text}"


_JUDGED = {
    ("tests", True): "tests passed",
    ("tests", False): "tests failed",
    ("answer", True): "answer right",
    ("answer", False): "answer wrong",
    (None, None): "nothing to judge it by",
}


def _samples(samples: Sequence[Record]) -> str:
    """Those of the last model; the others' where they are asked for."""
    if not samples:
        return "<p class=note>No answer was kept side by side.</p>"
    models = list(dict.fromkeys(sample["model"] for sample in samples))
    parts = {model: [sample_html(sample) for sample in samples if sample["model"] == model] for model in reversed(models)}
    last, *others = parts
    folded = (f"<details><summary>Samples of {escape(model)}: {len(parts[model])}</summary>{''.join(parts[model])}</details>" for model in others)
    return "".join([*parts[last], *folded])


def sample_html(sample: Record) -> str:
    heading = f"{sample['model']} · {sample['benchmark']} · {sample['problem_id']}"
    verdict = "same text" if sample["ar"] == sample["jacobi"] else "texts differ"
    judged = _JUDGED[sample["judged_by"], sample["passed"]]
    answers = "".join(f"<div><b>{name}</b><pre>{escape(sample[key])}</pre></div>" for name, key in (("greedy AR", "ar"), ("Jacobi", "jacobi")))
    prompt = f"<details><summary>prompt</summary><pre>{escape(sample['prompt'])}</pre></details>"
    return f"<h3>{escape(heading)}</h3><p class=note>{verdict}, {judged}</p>{prompt}<div class=pair>{answers}</div>"
