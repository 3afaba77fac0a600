"""The figures of a sweep: its jobs side by side, with the paper's numbers, and the noise they were trained on. Plotly only.

Made to be read in black and white: ours are full bars, the paper's are hatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.figures.style import finish

_ACROSS = 3  # histograms in a line


def comparison(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> go.Figure:
    """TPF (with its interval) and speedup at the setting common to all jobs, and accuracy, each beside the paper's where there is one.

    Args:
        rows: (label, row of `sweep.sweep_rows`); a job without results keeps its place, empty.
    """
    labels = [label for label, _ in rows]
    measures = (
        ("TPF (tokens per forward)", "common_tpf", "tpf", 1),
        ("speedup over AR (x)", "common_speedup", "speedup", 1),
        ("accuracy (%)", "accuracy", "accuracy", 100),
    )
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for place, (title, ours, paper, factor) in enumerate(measures, start=1):
        series = [
            ("here", "#0072b2", "", [row[ours] for _, row in rows]),
            ("paper", "#d55e00", "/", [(row["paper"] or {}).get(paper) for _, row in rows]),
        ]
        for name, color, hatch, values in series:
            if all(value is None for value in values):
                continue
            figure.add_bar(
                x=labels,
                y=[None if value is None else factor * value for value in values],
                name=name,
                legendgroup=name,
                showlegend=not any(trace.name == name for trace in figure.data),
                marker={"color": color, "pattern": {"shape": hatch}},
                texttemplate="%{y:.2f}" if factor == 1 else "%{y:.1f}",
                error_y=_whiskers(rows) if (name, ours) == ("here", "common_tpf") else None,
                row=place,
                col=1,
            )
        figure.update_yaxes(title_text=title, rangemode="tozero", row=place, col=1)
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=labels)
    finish(figure, "Every job: TPF, speedup and accuracy of its last model, ours full, the paper's hatched. From sweep.json.", legend="")
    return figure.update_layout(barmode="group", height=760)


def _whiskers(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any] | None:
    intervals = [(row["common_tpf"], row.get("common_tpf_interval")) for _, row in rows]
    if not any(interval for _, interval in intervals):
        return None
    reach = [(tpf - interval[0], interval[1] - tpf) if interval else (0, 0) for tpf, interval in intervals]
    return {"type": "data", "symmetric": False, "arrayminus": [low for low, _ in reach], "array": [high for _, high in reach]}


def noise_histograms(noises: Sequence[tuple[str, Mapping[str, Any]]]) -> go.Figure:
    """One histogram per job, `{edges, counts}` as in noise.json, as shares of its blocks on one scale."""
    lines = -(-len(noises) // _ACROSS)
    figure = make_subplots(rows=lines, cols=_ACROSS, subplot_titles=[label for label, _ in noises], shared_yaxes="all", shared_xaxes="all")
    for number, (label, noise) in enumerate(noises):
        total = sum(noise["counts"])
        figure.add_bar(
            x=noise["edges"],
            y=[100 * count / total for count in noise["counts"]],
            name=label,
            marker={"color": "#7f7f7f", "line": {"color": "#222222", "width": 1}},
            row=number // _ACROSS + 1,
            col=number % _ACROSS + 1,
        )
    figure.update_xaxes(title_text="noise ratio up to", row=lines)
    figure.update_yaxes(title_text="blocks (%)", col=1)
    finish(figure, "Share of packed blocks by noise ratio, one histogram per job; the first bar is exactly 0. From noise.json.")
    return figure.update_layout(showlegend=False, bargap=0.1, height=140 + 190 * lines, margin={"t": 40})
