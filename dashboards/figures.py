"""The figures of a run: pure functions from a pandas data frame to a Plotly figure. No files, no layout of pages.

Made to be read in black and white: every model has its own marker and dash, the colour only helps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

# The base, up to four rounds (then again from the first), and every baseline; the same in every figure.
_BASE = ("#222222", "circle", "solid")
_ROUNDS = [("#0072b2", "square", "dash"), ("#d55e00", "diamond", "dot"), ("#cc79a7", "cross", "longdash"), ("#7f7f7f", "star", "longdashdot")]
_BASELINE = ("#009e73", "triangle-up", "dashdot")


def _style(model: str, variant: int = 0) -> dict[str, dict[str, object]]:
    """Marker and line of a model; `variant` tells its decoding methods apart by how the marker is filled."""
    number = model.removeprefix("round")
    color, symbol, dash = _BASE if model == "base" else _ROUNDS[(int(number) - 1) % 4] if number.isdecimal() else _BASELINE
    filling = ("", "-open", "-dot", "-open-dot")[variant % 4]
    return {"marker": {"color": color, "symbol": symbol + filling, "size": 9}, "line": {"color": color, "dash": dash, "width": 2}}


def _finish(figure: go.Figure) -> go.Figure:
    figure.update_layout(template="simple_white", height=420, margin={"l": 70, "r": 20, "t": 40, "b": 60}, legend_title_text="model")
    figure.update_xaxes(showgrid=True, gridcolor="#e5e5e5")
    figure.update_yaxes(showgrid=True, gridcolor="#e5e5e5")
    return figure


def speed_accuracy(rows: pd.DataFrame) -> go.Figure:
    """Accuracy against wall-clock speedup, one point per decoding setting, labelled with its block size.

    Args:
        rows: result rows of one benchmark (columns `model, method, block_size, speedup, accuracy`); rows without an accuracy are left out.
    """
    rows = rows.dropna(subset=["accuracy", "speedup"])
    rows = rows.assign(accuracy=100 * rows["accuracy"].astype(float))
    figure = go.Figure()
    for model, group in rows.groupby("model", sort=False):
        group = group.sort_values("block_size")
        labels = ["AR" if method == "ar" else str(block) for method, block in zip(group["method"], group["block_size"], strict=True)]
        figure.add_scatter(
            x=group["speedup"],
            y=group["accuracy"],
            name=str(model),
            mode="markers+text",
            text=labels,
            textposition="top center",
            marker=_style(str(model))["marker"],
            hovertemplate="block %{text}: %{x:.2f}x, %{y:.1f} %<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title_text="speedup over greedy AR of the same model (x, wall clock)")
    # Ten points of room below: automatic scaling would blow a difference of one problem up to the whole axis.
    lowest = max(0.0, rows["accuracy"].min() - 10) if len(rows) else 0.0
    figure.update_yaxes(title_text="accuracy (% of problems solved)", range=[lowest, 104])
    return _finish(figure)


def tpf_by_block_size(rows: pd.DataFrame) -> go.Figure:
    """Tokens per forward against the decoding block size, one line per model (and method, where there are several).

    Args:
        rows: result rows of one benchmark (columns `model, method, block_size, tpf`); greedy AR is the dotted line at 1.
    """
    blocks = rows[rows["method"] != "ar"]
    methods = blocks["method"].unique().tolist()
    figure = go.Figure()
    for (model, method), group in blocks.groupby(["model", "method"], sort=False):
        group = group.sort_values("block_size")
        name = f"{model}, {method}" if len(methods) > 1 else model
        style = _style(model, methods.index(method))
        figure.add_scatter(x=group["block_size"], y=group["tpf"], name=name, mode="lines+markers", **style)
    figure.add_hline(y=1, line={"color": "#888888", "width": 1, "dash": "dot"}, annotation_text="greedy AR", annotation_position="bottom right")
    sizes = sorted(blocks["block_size"].unique().tolist())
    figure.update_xaxes(title_text="decoding block size (tokens, log scale)", type="log", tickvals=sizes, ticktext=[str(size) for size in sizes])
    figure.update_yaxes(title_text="TPF (tokens per forward)", rangemode="tozero")
    return _finish(figure)


def training_curves(curves: pd.DataFrame) -> go.Figure:
    """Both loss terms of every distillation against the packed tokens it has seen, side by side.

    Args:
        curves: one row per logged step (columns `model, tokens, consistency, ar`), losses in nats per counted token.
    """
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    for model, group in curves.groupby("model", sort=False):
        line = _style(str(model))["line"]
        for column, loss in enumerate(("consistency", "ar"), start=1):
            figure.add_scatter(
                x=group["tokens"] / 1e6,
                y=group[loss],
                name=str(model),
                legendgroup=str(model),
                showlegend=column == 1,
                mode="lines",
                line=line,
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="packed tokens trained on (millions)", rangemode="tozero")
    figure.update_yaxes(title_text="consistency loss (KL, nats per token)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="AR loss (nats per token)", rangemode="tozero", row=1, col=2)
    return _finish(figure)


def accuracy_under_parallelism(curves: pd.DataFrame) -> go.Figure:
    """Accuracy against tokens per forward, one line per model, labelled with its AUP.

    Args:
        curves: one row per model of one benchmark (columns `model, points, aup`), points being `[[TPF, accuracy], ...]` by rising TPF.
    """
    figure = go.Figure()
    lowest = 1.0
    for model, points, area in zip(curves["model"], curves["points"], curves["aup"], strict=True):
        lowest = min([lowest, *(accuracy for _, accuracy in points)])
        figure.add_scatter(
            x=[tpf for tpf, _ in points],
            y=[100 * accuracy for _, accuracy in points],
            name=f"{model}, AUP {area:.0f}",
            mode="lines+markers",
            **_style(str(model)),
        )
    figure.update_xaxes(title_text="TPF (tokens per forward)", rangemode="tozero")
    figure.update_yaxes(title_text="accuracy (% of problems solved)", range=[max(0.0, 100 * lowest - 10), 104])
    return _finish(figure)


def latency(curves: Sequence[Mapping[str, Any]]) -> go.Figure:
    """How much longer than one token a forward over m tokens takes, one line per batch size and context (the paper's Figure 5).

    Args:
        curves: those of latency.json, `{batch_size, context, tokens, seconds, free_tokens}`.
    """
    figure = go.Figure()
    dashes = ("solid", "dash", "dot", "dashdot", "longdash")
    batches, contexts = (list(dict.fromkeys(curve[key] for curve in curves)) for key in ("batch_size", "context"))
    for curve in curves:
        figure.add_scatter(
            x=curve["tokens"],
            y=[seconds / curve["seconds"][0] for seconds in curve["seconds"]],
            name=f"batch {curve['batch_size']}, context {curve['context']}: {1e3 * curve['seconds'][0]:.2f} ms, {curve['free_tokens']} free",
            mode="lines+markers",
            marker={"symbol": ("circle", "square", "diamond", "cross", "star")[batches.index(curve["batch_size"]) % 5], "size": 8},
            line={"dash": dashes[contexts.index(curve["context"]) % 5], "width": 2},
        )
    figure.update_xaxes(title_text="tokens fed per text (log scale)", type="log", tickvals=curves[0]["tokens"])
    figure.update_yaxes(title_text="latency over that of one token (x, log scale)", type="log")
    return _finish(figure).update_layout(legend_title_text="latency of one token, free tokens")
