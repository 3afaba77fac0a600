"""What training buys: tokens per forward of a distillation's probes against the packed tokens trained on until then, with a fitted line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.style import finish, model_look

FEWEST = 4  # points of a fit: a line through two or three says nothing about itself


@dataclass(frozen=True)
class LogFit:
    """TPF = at_one + per_doubling * log2(tokens), by least squares. r2: share of the points' variance that it explains (1 where they have none)."""

    at_one: float
    per_doubling: float
    r2: float
    points: int

    def __call__(self, tokens: float) -> float:
        return self.at_one + self.per_doubling * float(np.log2(tokens))

    def __str__(self) -> str:
        line = f"TPF = {self.at_one:.3f} {'-' if self.per_doubling < 0 else '+'} {abs(self.per_doubling):.3f} log2(tokens)"
        return f"{line} through {self.points} probes (R² {self.r2:.3f}): twice the tokens, {self.per_doubling:+.3f} TPF"


def log_fit(tokens: Sequence[float], tpf: Sequence[float]) -> LogFit | None:
    """Of the points with tokens above 0; None where fewer than FEWEST differ in tokens."""
    x, y = np.asarray(tokens, dtype=float), np.asarray(tpf, dtype=float)
    x, y = np.log2(x[x > 0]), y[x > 0]
    if len(np.unique(x)) < FEWEST:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    left, all_ = np.sum((y - intercept - slope * x) ** 2), np.sum((y - y.mean()) ** 2)
    return LogFit(float(intercept), float(slope), float(1 - left / all_) if all_ > 0 else 1.0, len(x))


def probes_by_tokens(probes: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """Probes of after the first step (columns `model, step, tpf`) with the `tokens` trained on until then, from the logged steps (columns `model,
    step, tokens`), straight lines between them; a model without logged steps has no rows."""
    found = []
    for model, group in probes[probes["step"] > 0].groupby("model", sort=False):
        logged = curves[curves["model"] == model]
        if len(logged):
            tokens = np.interp(group["step"], [0, *logged["step"]], [0, *logged["tokens"]])
            found.append(group[["model", "step", "tpf"]].assign(tokens=tokens))
    return pd.concat(found) if found else pd.DataFrame(columns=["model", "step", "tpf", "tokens"])


def tpf_by_tokens(points: pd.DataFrame) -> go.Figure:
    """Tokens per forward against packed tokens (log scale), and every distillation's fit.

    Args:
        points: as `probes_by_tokens` returns them, tokens above 0.
    """
    figure, fits = go.Figure(), _fits(points)
    for model, group in points.groupby("model", sort=False):
        look = model_look(str(model))
        figure.add_scatter(x=group["tokens"], y=group["tpf"], name=str(model), mode="markers", marker=look["marker"])
        if fit := fits[model]:
            ends = [group["tokens"].min(), group["tokens"].max()]
            figure.add_scatter(x=ends, y=[fit(end) for end in ends], name=f"{model}, fit", mode="lines", line=look["line"])
    figure.update_xaxes(title_text="packed tokens trained on (log scale)", type="log")
    figure.update_yaxes(title_text="TPF (tokens per forward)", rangemode="tozero")
    return finish(
        figure,
        f"Greedy Jacobi decoding of the probe prompts while distillations go on. {fits_in_words(points)} From training.json of every distillation.",
    )


def fits_in_words(points: pd.DataFrame) -> str:
    """One sentence per distillation; points: as `probes_by_tokens` returns them."""
    return " ".join(f"{model}: {fit or 'too few probes for a fit'}." for model, fit in _fits(points).items())


def _fits(points: pd.DataFrame) -> dict[str, LogFit | None]:
    return {str(model): log_fit(group["tokens"].tolist(), group["tpf"].tolist()) for model, group in points.groupby("model", sort=False)}
