"""Figures of result rows: accuracy, speed and tokens per forward of models, decoding settings and runs."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.style import finish, model_look, numbered_look


def speed_accuracy(rows: pd.DataFrame) -> go.Figure:
    """Accuracy against wall-clock speedup, one point per decoding setting, labelled with its block size; what none beats in both is joined.

    Args:
        rows: result rows of one benchmark (columns `model, method, block_size, speedup, accuracy`); rows without an accuracy are left out.
    """
    rows = rows.dropna(subset=["accuracy", "speedup"])
    rows = rows.assign(accuracy=100 * rows["accuracy"].astype(float))
    figure = go.Figure()
    if len(rows):
        _add_front(figure, pareto_front(rows))
    reach = rows["speedup"].max() - rows["speedup"].min()
    for number, (model, group) in enumerate(rows.groupby("model", sort=False)):
        group = group.sort_values("block_size")
        names = [_point(method, block) for method, block in zip(group["method"], group["block_size"], strict=True)]
        figure.add_scatter(
            x=group["speedup"],
            y=group["accuracy"],
            name=str(model),
            mode="markers+text",
            text=_apart(["" if number and name == "AR" else name for name in names], group["speedup"].tolist(), room=0.04 * reach),
            textposition="bottom center" if number % 2 else "top center",  # models of about the same accuracy are each other's neighbours
            customdata=names,
            marker=model_look(str(model))["marker"],
            hovertemplate="%{customdata}: %{x:.2f}x, %{y:.1f} %<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title_text="speedup over greedy AR of the same model (x, wall clock)")
    _accuracy_axis(figure, rows["accuracy"].tolist())
    return finish(figure, "Each point is one decoding setting of one model: its block size, or AR. From results.json, rows of one benchmark.")


def _point(method: str, block: int) -> str:
    """Plain Jacobi decoding by its block size alone."""
    return {"ar": "AR", "jacobi": str(block)}.get(method, f"{method} {block}")


def _apart(names: list[str], places: list[float], *, room: float) -> list[str]:
    """The names as they can be written: those of points nearer to each other than `room` stand together, at the first of them."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    written, first = [""] * len(names), order[0]
    for i in order:
        if places[i] - places[first] > room:
            first = i
        written[first] = ", ".join(filter(None, [written[first], names[i]]))
    return written


def tpf_by_block_size(rows: pd.DataFrame) -> go.Figure:
    """Tokens per forward against the decoding block size, one line per model (and method, where there are several).

    Args:
        rows: result rows of one benchmark (columns `model, method, block_size, tpf`); greedy AR is the dotted line at 1. Where there are columns
            `tpf_low, tpf_high`, the range of several runs, `tpf` is their mean and the range is drawn.
    """
    blocks = rows[rows["method"] != "ar"]
    methods = blocks["method"].unique().tolist()
    figure = go.Figure()
    for (model, method), group in blocks.groupby(["model", "method"], sort=False):
        group = group.sort_values("block_size")
        name = f"{model}, {method}" if len(methods) > 1 else model
        style = model_look(model, methods.index(method))
        if "tpf_low" in group:
            above, below = group["tpf_high"] - group["tpf"], group["tpf"] - group["tpf_low"]
            style["error_y"] = {"array": above, "arrayminus": below, "thickness": 1, "width": 4}
        figure.add_scatter(x=group["block_size"], y=group["tpf"], name=name, mode="lines+markers", **style)
    figure.add_hline(y=1, line={"color": "#888888", "width": 1, "dash": "dot"}, annotation_text="greedy AR", annotation_position="bottom right")
    sizes = sorted(blocks["block_size"].unique().tolist())
    figure.update_xaxes(title_text="decoding block size (tokens, log scale)", type="log", tickvals=sizes, ticktext=[str(size) for size in sizes])
    figure.update_yaxes(title_text="TPF (tokens per forward)", rangemode="tozero")
    return finish(
        figure,
        "Committed tokens over forward passes, prefill counted; it does not depend on the machine. Base: before training; every line above it: after "
        "one more round. From results.json, rows of one benchmark.",
    )


def accuracy_under_parallelism(curves: pd.DataFrame) -> go.Figure:
    """Accuracy against tokens per forward, one line per model, labelled with its AUP.

    Args:
        curves: one row per model of one benchmark (columns `model, points, aup`), points being `[[TPF, accuracy], ...]` by rising TPF.
    """
    figure = go.Figure()
    for model, points, area in zip(curves["model"], curves["points"], curves["aup"], strict=True):
        figure.add_scatter(
            x=[tpf for tpf, _ in points],
            y=[100 * accuracy for _, accuracy in points],
            name=f"{model}, AUP {area:.0f}",
            mode="lines+markers",
            **model_look(str(model)),
        )
    figure.update_xaxes(title_text="TPF (tokens per forward)", rangemode="tozero")
    _accuracy_axis(figure, [100 * accuracy for points in curves["points"] for _, accuracy in points])
    return finish(figure, "Best accuracy of every TPF, slowest setting first; the definition of AUP stands in results.md. From results.json.")


def _accuracy_axis(figure: go.Figure, percent: list[float]) -> None:
    """Ten points of room on both sides: automatic scaling would blow a difference of one problem up to the whole axis."""
    lowest, highest = (min(percent), max(percent)) if percent else (0.0, 100.0)
    shown = [max(0.0, lowest - 10), min(104.0, highest + 10)]
    figure.update_yaxes(title_text="accuracy (% of problems solved)", range=shown, dtick=5 if shown[1] - shown[0] < 45 else 20)


def runs_pareto(rows: pd.DataFrame) -> go.Figure:
    """Accuracy against speedup of every model and setting of several runs; the settings that no other beats in both are joined and labelled.

    Args:
        rows: result rows of one benchmark, each with its run (columns `run, model, method, block_size, speedup, accuracy`); rows without an
            accuracy or a speedup are left out.
    """
    rows = rows.dropna(subset=["accuracy", "speedup"])
    rows = rows.assign(accuracy=100 * rows["accuracy"].astype(float), speedup=rows["speedup"].astype(float))
    figure = go.Figure()
    front = pareto_front(rows)
    _add_front(figure, front)
    for place, (_, row) in enumerate(front.iterrows()):
        side = "right" if place and place == len(front) - 1 else "center"  # the fastest stands at the edge
        figure.add_annotation(x=row["speedup"], y=row["accuracy"], text=_setting(row), showarrow=False, yshift=14, xanchor=side)
    for number, (run, group) in enumerate(rows.groupby("run", sort=False)):
        figure.add_scatter(
            x=group["speedup"],
            y=group["accuracy"],
            name=str(run),
            mode="markers",
            marker=numbered_look(number)["marker"],
            customdata=[_setting(row) for _, row in group.iterrows()],
            hovertemplate="%{customdata}: %{x:.2f}x, %{y:.1f} %<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title_text="speedup over greedy AR of the same model (x, wall clock)")
    _accuracy_axis(figure, rows["accuracy"].tolist())
    finish(
        figure,
        "Every model and decoding setting of the chosen runs; dotted: the settings that none beats in both speed and accuracy. Speedups are over AR "
        "of the same model on the machine that timed it. From every run's results.json.",
        legend="",
    )
    return figure.update_layout(legend={"orientation": "h", "y": -0.22, "yanchor": "top"})


def _add_front(figure: go.Figure, front: pd.DataFrame) -> None:
    figure.add_scatter(
        x=front["speedup"],
        y=front["accuracy"],
        name="Pareto front",
        mode="lines",
        line={"color": "#222222", "dash": "dot", "width": 1.5},
        hoverinfo="skip",
    )


def pareto_front(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that no other one beats in both `speedup` and `accuracy`, slowest first; of equal ones the first."""
    ordered = rows.sort_values(["speedup", "accuracy"], ascending=False, kind="stable")
    best = ordered["accuracy"].cummax().shift(fill_value=float("-inf"))
    return ordered[ordered["accuracy"] > best].iloc[::-1]


def _setting(row: pd.Series) -> str:
    return f"{row['model']} AR" if row["method"] == "ar" else f"{row['model']} {row['method']}@{row['block_size']}"
