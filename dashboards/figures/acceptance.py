"""Figures of acceptance: how many tokens forwards commit, by position over many answers and along a single one."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.style import finish, model_look, numbered_look


def acceptance_shares(forwards: Mapping[int, int]) -> list[float]:
    """Share of forwards that accepted at least k draft tokens, for k = 1, 2, ... up to the most accepted, and k = 1 in any case.

    forwards: committed tokens -> number of forwards; the one token that every forward yields anyway is not a draft's.
    """
    total = sum(forwards.values())
    return [sum(count for committed, count in forwards.items() if committed > k) / total for k in range(1, max(2, *forwards))]


def accepted_by_position(shares: pd.DataFrame) -> go.Figure:
    """Share of forwards that accept the k-th draft token, one line per model: before (base) and after each round.

    Args:
        shares: one row per model and position (columns `model, position, share`), all of one decoding setting.
    """
    figure = go.Figure()
    for model, group in shares.groupby("model", sort=False):
        looks = model_look(str(model))
        looks["marker"]["maxdisplayed"] = 12  # enough to know a line by; one per position would cover it
        figure.add_scatter(x=group["position"], y=100 * group["share"], name=str(model), mode="lines+markers", **looks)
    figure.update_xaxes(title_text="position k in the draft", rangemode="tozero")
    figure.update_yaxes(title_text="forwards that accept the k-th draft token (%)", range=[0, 104])
    return finish(
        figure,
        "Share of all forwards over the timed prompts, at one decoding setting; base is before training, each round after it. From "
        "accepted_lengths of every evaluation.json.",
    )


def accepted_along(forwards: pd.DataFrame) -> go.Figure:
    """Tokens committed by each forward, along one answer, one step line per decoder; AR is level at 1.

    Args:
        forwards: one row per forward in order (columns `name, committed, source`), source being where the accepted tokens came from.
    """
    figure = go.Figure()
    for number, (name, group) in enumerate(forwards.groupby("name", sort=False)):
        committed = group["committed"].tolist()
        starts = [0, *group["committed"].cumsum().tolist()]
        sources = [*group["source"], ""]
        figure.add_scatter(
            x=starts,
            y=[*committed, committed[-1]],
            name=f"{name}: {starts[-1]} tokens in {len(committed)} forwards",
            mode="lines",
            line=numbered_look(number)["line"] | {"shape": "hv"},
            customdata=[[i + 1, source] for i, source in enumerate(sources)],
            hovertemplate="forward %{customdata[0]}: %{y} tokens (%{customdata[1]}) from token %{x} on<extra></extra>",
        )
    figure.update_xaxes(title_text="answer tokens so far", rangemode="tozero")
    figure.update_yaxes(title_text="tokens committed by the forward", rangemode="tozero")
    finish(
        figure,
        "Every step is one forward: as wide and as high as the tokens it commits, so that few and high steps are few forwards. From the "
        "decoding itself, or accepted_lengths of speed-*.parquet.",
        legend="",
    )
    return figure.update_layout(height=340, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
