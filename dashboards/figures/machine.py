"""Figures of the machine: how long forwards take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.style import finish

_SYMBOLS = ("circle", "square", "diamond", "cross", "star")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_COLORS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7")


def latency(curves: pd.DataFrame | Sequence[Mapping[str, Any]]) -> go.Figure:
    """How much longer than one token a forward over m tokens takes, one line per batch size and context (the paper's Figure 5), and its knee.

    Args:
        curves: those of latency.json (columns `batch_size, context, tokens, seconds, free_tokens, knee`, tokens and seconds being lists); a knee at
            the widest forward means that none was reached, and has no mark.
    """
    curves = pd.DataFrame(curves).to_dict("records")
    figure = go.Figure()
    batches, contexts = (list(dict.fromkeys(curve[key] for curve in curves)) for key in ("batch_size", "context"))
    for curve in curves:
        batch, context = batches.index(curve["batch_size"]) % 5, contexts.index(curve["context"]) % 5
        one = curve["seconds"][0]
        name = f"batch {curve['batch_size']}, context {curve['context']}: {1e3 * one:.2f} ms, {curve['free_tokens']} free"
        figure.add_scatter(
            x=curve["tokens"],
            y=[seconds / one for seconds in curve["seconds"]],
            name=name,
            legendgroup=name,
            mode="lines+markers",
            marker={"symbol": _SYMBOLS[batch], "size": 8, "color": _COLORS[batch]},
            line={"dash": _DASHES[context], "width": 2, "color": _COLORS[batch]},
        )
    knees = [curve for curve in curves if curve["knee"] < curve["tokens"][-1]]
    if knees:
        figure.add_scatter(
            x=[curve["knee"] for curve in knees],
            y=[1.0] * len(knees),
            name="knee",
            mode="markers+text",
            text=[f"{curve['knee']:.0f}" for curve in knees],
            textposition="bottom center",
            marker={"symbol": "x-thin", "size": 12, "line": {"width": 2, "color": "#222222"}},
            hovertemplate="knee at %{x:.1f} tokens<extra></extra>",
            cliponaxis=False,
        )
    widths = sorted({width for curve in curves for width in curve["tokens"]})
    figure.update_xaxes(title_text="tokens fed per text (log scale)", type="log", tickvals=widths)
    figure.update_yaxes(title_text="latency over that of one token (x, log scale)", type="log")
    return finish(
        figure,
        "A forward over m tokens, the quickest of five. Knee: where the line through the two widest forwards meets the latency of one token; below "
        "it a forward waits for the weights, beyond it every token costs. From latency.json.",
        legend="latency of one token, free tokens",
    )
