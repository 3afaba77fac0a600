"""Figures of one or several distillations: losses of every logged step, and the probes in between."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.figures.style import finish, model_look

_PROBED = (
    ("tpf", "TPF (tokens per forward)"),
    ("equal_to_teacher", "equal to the teacher's (share)"),
    ("distinct_2", "distinct 2-grams (share)"),
    ("eos_rate", "ended by itself (share)"),
)


def training_curves(curves: pd.DataFrame) -> go.Figure:
    """Both loss terms of every distillation against the packed tokens it has seen, side by side.

    Args:
        curves: one row per logged step (columns `model, tokens, consistency, ar`), losses in nats per counted token.
    """
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    for model, group in curves.groupby("model", sort=False):
        line = model_look(str(model))["line"]
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
    return finish(
        figure,
        "Loss terms of every logged optimizer step, each averaged over the tokens it counts in the global batch. From training.json of "
        "every distillation.",
    )


def probe_curves(probes: pd.DataFrame) -> go.Figure:
    """What the probes of every distillation saw while it trained: speed, and whether the text stays the teacher's and sound.

    Args:
        probes: one row per probe (columns `model, step, tpf, equal_to_teacher, distinct_2, eos_rate`); step 0 is before training.
    """
    figure = make_subplots(rows=2, cols=2, horizontal_spacing=0.12, vertical_spacing=0.12, shared_xaxes=True)
    for model, group in probes.groupby("model", sort=False):
        for place, (column, _) in enumerate(_PROBED):
            figure.add_scatter(
                x=group["step"],
                y=group[column],
                name=str(model),
                legendgroup=str(model),
                showlegend=place == 0,
                mode="lines+markers",
                row=place // 2 + 1,
                col=place % 2 + 1,
                **model_look(str(model)),
            )
    for place, (column, title) in enumerate(_PROBED):
        top = {"rangemode": "tozero"} if column == "tpf" else {"range": [0, 1.04]}
        figure.update_yaxes(title_text=title, row=place // 2 + 1, col=place % 2 + 1, **top)
    figure.update_xaxes(title_text="optimizer step", row=2)
    finish(
        figure,
        "Greedy Jacobi decoding of the probe prompts, before a distillation (step 0) and while it goes on; teacher: the weights it started from. "
        "From training.json of every distillation.",
    )
    return figure.update_layout(height=620)
