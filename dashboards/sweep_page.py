"""A sweep as one self-contained HTML page: table, figures, what its jobs took, their answers to one prompt. Reads and writes no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from dashboards.figures import runs_pareto
from dashboards.page import sample_html, shown_html, whole_page, wide_table
from dashboards.report_figures import Shown
from dashboards.sweep import Job, columns, label, labels, notes
from dashboards.sweep_figures import comparison, noise_histograms
from dashboards.table import Columns, Row

TIMES_LEGEND = (
    "Wall time of the job and of it the stages' own work; stages that an earlier job, or an earlier run, had finished were taken from the store."
)


def sweep_figures(rows: Sequence[Row]) -> list[Shown]:
    """The figures of rows made by `sweep.sweep_rows`."""
    named, setting = list(zip(labels(rows), rows, strict=True)), rows[0]["common_setting"]
    prompts = min((row["timed_prompts"] for row in rows if row["timed_prompts"]), default=0)
    about = f"the model of its last round, over {prompts} timed prompts" if prompts else "the model of its last round"
    at = "at no setting that all jobs share" if setting is None else f"at {setting} in every job, one prompt at a time"
    whiskers = "; whiskers: 95 % bootstrap interval over prompts" if any(row["common_tpf_interval"] for row in rows) else ""
    paper = " Hatched: the paper's, of another model." if any(row["paper"] for row in rows) else ""
    note = f"TPF and speedup of every job ({about}) {at}{whiskers}; accuracy in % of problems solved.{paper}"
    found = [Shown("every_job", "Every job", note, comparison(named))]
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows if row["benchmark"]):
        found.append(_pareto(benchmark, [(name, row) for name, row in named if row["benchmark"] == benchmark]))
    noises = [(label(row), row["noise"]) for row in rows if row["noise"]]
    if noises:
        note = "Share of the packed blocks of every job's last round by their noise ratio; the first bar is exactly 0. From its noise.json."
        found.append(Shown("noise", "Noise really produced", note, noise_histograms(noises)))
    return found


def _pareto(benchmark: str, named: Sequence[tuple[str, Row]]) -> Shown:
    points = [
        {"run": name, "model": row["trained_model"], "method": method, "block_size": int(block), "speedup": speedup, "accuracy": row["accuracy"]}
        for name, row in named
        for setting, speedup in {"ar@1": 1.0, **row["speedup"]}.items()
        for method, _, block in [setting.partition("@")]
    ]
    name, title = f"speed_accuracy_{benchmark}", f"Speed and accuracy over jobs, {benchmark}"
    if all(point["accuracy"] is None for point in points):
        return Shown(name, title, "Nothing tells right answers from wrong ones here.")
    solved = max(row["accuracy_prompts"] or 0 for _, row in named)
    note = (
        "Every decoding setting of every job's last model, and of the base; dotted: those that none beats in both. Speedups are over greedy AR of "
        f"the same model; accuracy over {solved} problems of {benchmark}."
    )
    return Shown(name, title, note, runs_pareto(pd.DataFrame(points)))


def sweep_page(rows: Sequence[Row], jobs: Sequence[Job], shown: Sequence[Shown], *, title: str, about: Sequence[str]) -> str:
    """rows, shown: of `sweep_rows` and `sweep_figures`."""
    sections = {
        "Results": wide_table(rows, columns(rows)) + "".join(f"<p class=note>{escape(note)}</p>" for note in notes(rows, about)),
        "Figures": "".join(map(shown_html, shown)),
        "What was run, and what it took": _costs(jobs),
        "Samples": _samples(jobs),
    }
    return whole_page(title, "", sections)


def _costs(jobs: Sequence[Job]) -> str:
    found: Columns = [
        ("job", lambda job: str(job["number"]), True),
        ("settings", lambda job: label(job), True),
        ("state", lambda job: "no results" if job["error"] else "finished", True),
        ("seconds", lambda job: _time(job, "seconds"), False),
        ("stages' work", lambda job: _time(job, "useful"), False),
        ("stages computed", lambda job: _stages(job["times"], cached=False), False),
        ("from the store", lambda job: _stages(job["times"], cached=True), False),
    ]
    timed = [job["times"]["run"]["seconds"] for job in jobs if job["times"]]
    sums = f"<p>{len(jobs)} jobs, {sum(timed):,.0f} s of wall time in all.</p>" if timed else "<p class=note>What the jobs took is not recorded.</p>"
    links = " · ".join(f'<a href="{escape(job["report"], quote=True)}">{escape(label(job))}</a>' for job in jobs if job["report"])
    reports = f"<p>Reports of the jobs, with their stages and the stages' runs: {links}</p>" if links else ""
    return f"{sums}{wide_table(jobs, found)}<p class=note>{TIMES_LEGEND}</p>{reports}"


def _time(job: Job, key: str) -> str:
    return f"{job['times']['run'][key]:,.1f}" if job["times"] else "-"


def _stages(times: Mapping[str, Any] | None, *, cached: bool) -> str:
    return str(sum(stage["cached"] is cached for stage in times["stages"].values())) if times else "-"


def _samples(jobs: Sequence[Job]) -> str:
    """One per job: side by side with AR of the same model."""
    parts = [f"<details><summary>{escape(label(job))}</summary>{sample_html(job['sample'])}</details>" for job in jobs if job["sample"]]
    return "".join(parts) or "<p class=note>No answer was kept side by side.</p>"
