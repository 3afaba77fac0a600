"""Pick runs from the tracking store and compare them; look into one of them. Loss curves of running stages are MLflow's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from dashboards import figures, stored, tracked
from dashboards.paper_table import PAPER, PAPER_LEGEND, REFERENCES, paper_rows
from dashboards.stored import Unreadable
from dashboards.table import html_table, told
from dashboards.tracked import TrackedRun
from dashboards.views.common import Place, sentences, show

TABLE_STYLE = """<style>
.results { overflow-x: auto; } .results table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
.results th, .results td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; color: #222; }
.results .left { text-align: left; }
</style>"""


@st.cache_data(show_spinner="Reading results", ttl=600, max_entries=100)
def _results(uri: str, run: TrackedRun) -> dict[str, Any]:
    return tracked.results(tracked.connect(uri), run)


def page(place: Place) -> None:
    st.title("Runs", anchor=False)
    with sentences():
        with st.spinner("Reading the tracking store"):
            client = tracked.connect(place.tracking_uri)
            runs = {run.title: run for run in tracked.pipeline_runs(client)}
        if not runs:
            raise Unreadable("The tracking store holds no pipeline run yet; make quickstart makes one.")
        first = next((title for title, run in runs.items() if run.status == "FINISHED"), None)
        chosen = [runs[title] for title in st.multiselect("Runs to compare", list(runs), default=[first] if first else [])]
        if not chosen:
            raise Unreadable("No run is chosen, or none has finished yet: choose one above.")
        found: dict[str, dict[str, Any]] = {}
        for run in chosen:
            with sentences():  # one run without results does not hide the others
                found[run.title] = _results(place.tracking_uri, run)
        if found:
            kept = [run for run in chosen if run.title in found]
            benchmark = _compare(kept, found)
            st.divider()
            run = runs[st.selectbox("Run to look into", [run.title for run in kept])]
            _look_into(place, client, run, found[run.title], benchmark)


def _compare(runs: list[TrackedRun], found: dict[str, dict[str, Any]]) -> str:
    """The benchmark that was chosen."""
    measured = {run.title: tracked.rows(found[run.title], run) for run in runs}
    benchmark = st.selectbox("Benchmark", list(dict.fromkeys(row["benchmark"] for rows in measured.values() for row in rows)))
    measured = {title: [row for row in rows if row["benchmark"] == benchmark] for title, rows in measured.items()}
    lines = [line for rows in measured.values() for line in paper_rows(rows)]
    columns = [("run", lambda row: str(row["run"]), True), *PAPER[1:]] if len(runs) > 1 else PAPER[1:]
    st.html(f'{TABLE_STYLE}<div class="results" tabindex="0">{html_table(lines, told(lines, columns))}</div>')
    st.caption(PAPER_LEGEND)
    frame = _ours([row for rows in measured.values() for row in rows])
    if frame["accuracy"].notna().any():
        show(figures.runs_pareto(frame), "Speed and accuracy over runs")
    return benchmark


def _ours(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Without other people's decoders."""
    return pd.DataFrame([row for row in rows if row["method"] not in REFERENCES])


def _look_into(place: Place, client: Any, run: TrackedRun, results: dict[str, Any], benchmark: str) -> None:
    rows = _ours([row for row in tracked.rows(results, run) if row["benchmark"] == benchmark])
    stages = tracked.stages(client, run)
    speed, acceptance, training, machine = st.tabs(["Speed", "Acceptance", "Training", "Machine"])
    with speed, sentences():
        if not len(rows):
            raise Unreadable(f"This run has no results on {benchmark}.")
        show(figures.tpf_by_block_size(rows), f"Tokens per forward before and after each round, {benchmark}")
        if rows["accuracy"].notna().any():
            show(figures.speed_accuracy(rows), f"Speed and accuracy, {benchmark}")
    with acceptance, sentences():
        _acceptance(place, stages, benchmark)
    with training, sentences():
        _training(place, stages)
    with machine, sentences():
        if "latency" not in results:
            raise Unreadable("This run did not measure latency (the setting measure_latency adds that stage).")
        show(figures.latency(results["latency"]["curves"]), "Latency of a forward")


def _of(place: Place, stages: dict[str, str], kind: str) -> dict[str, Path]:
    """Folders of the stages `<model>/.../<kind>`, by stage id. Raises Unreadable where the run has none, or the store lacks one."""
    found = {stage: fingerprint for stage, fingerprint in stages.items() if stage.split("/")[-1] == kind}
    if not found:
        raise Unreadable(f"This run has no {kind} stage.")
    return {stage: place.stages.folder(fingerprint) for stage, fingerprint in found.items()}


def _acceptance(place: Place, stages: dict[str, str], benchmark: str) -> None:
    evaluations = [stored.evaluation(folder) for folder in _of(place, stages, "evaluate").values()]
    lengths = {found["model"]: stored.accepted_lengths(found) for found in evaluations if found["benchmark"] == benchmark}
    settings = list(dict.fromkeys(setting for of in lengths.values() for setting in of))
    if not settings:
        raise Unreadable(f"No forwards of drafts are recorded for {benchmark}: AR accepts none.")
    setting = st.selectbox("Decoding setting (method@block size)", settings, index=len(settings) - 1)
    shares = [
        {"model": model, "position": k, "share": share}
        for model, of in lengths.items()
        if setting in of
        for k, share in enumerate(figures.acceptance_shares(of[setting]), start=1)
    ]
    show(figures.accepted_by_position(pd.DataFrame(shares)), f"Accepted draft tokens by position, {benchmark}, {setting}")


def _training(place: Place, stages: dict[str, str]) -> None:
    curves, probes = zip(*(stored.training(folder, stage.split("/")[0]) for stage, folder in _of(place, stages, "distill").items()), strict=True)
    show(figures.training_curves(pd.concat(curves)), "Losses")
    probed = [frame for frame in probes if len(frame)]
    if not probed:
        raise Unreadable("No distillation of this run was probed while it trained (distill.probe).")
    show(figures.probe_curves(pd.concat(probed)), "Probes")
