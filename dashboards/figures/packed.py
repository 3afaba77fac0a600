"""A packed training row: how prompts, noisy and clean blocks are laid out in it, and who may see whom."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.style import finish

KINDS = {0: ("prompt", "#bfbfbf", ""), 1: ("noisy block", "#f0b060", "/"), 2: ("clean block", "#0b4f8a", "")}  # name, colour, hatch

_NARROWEST = 0.03  # share of an axis that a segment's name needs


def segments(tokens: pd.DataFrame) -> pd.DataFrame:
    """Tokens of one sample, kind and block that follow each other (columns as in `packed_sequence`), one row each: `sample, kind, block, window,
    start, length, positions, text, consistency, ar, noise`.

    noise: of a noisy block, the share of it from its first token on that is not the clean one's; the rest have none.
    """
    keys = ["sample", "kind", "block"]
    change = (tokens[keys] != tokens[keys].shift()).any(axis="columns").cumsum()
    rows = []
    for _, part in tokens.groupby(change, sort=False):
        first, last = part.iloc[0], part.iloc[-1]
        rows.append(
            {key: int(first[key]) for key in (*keys, "window")}
            | {
                "start": int(part.index[0]),
                "length": len(part),
                "positions": f"{first['position']}-{last['position']}",
                "text": "".join(part["text"]),
            }
            | {"consistency": int((part["teacher"] >= 0).sum()), "ar": int((part["label"] >= 0).sum()), "ids": part["id"].tolist()}
        )
    clean = {(row["sample"], row["block"]): row["ids"] for row in rows if row["kind"] == 2}
    for row in rows:
        ids = row.pop("ids")
        row["noise"] = _noise(ids, clean.get((row["sample"], row["block"]))) if row["kind"] == 1 else None
    return pd.DataFrame(rows)


def _noise(noisy: list[int], clean: list[int] | None) -> float | None:
    if clean is None or len(clean) != len(noisy):
        return None
    right = next((i for i, (a, b) in enumerate(zip(noisy, clean, strict=True)) if a != b), len(noisy))
    return 1 - right / len(noisy)


def packed_sequence(tokens: pd.DataFrame) -> go.Figure:
    """One packed row as it is fed: samples one below the other, prompt, noisy and clean blocks along the row.

    Args:
        tokens: one row per token of the row, in its order (columns `sample, kind, block, window, position, id, text, label, teacher`); kind is 0
            prompt, 1 noisy, 2 clean; label and teacher are negative where a token carries no such loss.
    """
    parts = segments(tokens)
    figure = go.Figure()
    for kind, (name, color, hatch) in KINDS.items():
        group = parts[parts["kind"] == kind]
        figure.add_bar(
            y=[f"sample {sample}" for sample in group["sample"]],
            x=group["length"],
            base=group["start"],
            orientation="h",
            name=name,
            marker={"color": color, "pattern": {"shape": hatch, "fgcolor": "#222222", "size": 6}, "line": {"color": "#ffffff", "width": 1}},
            customdata=[_told(row) for _, row in group.iterrows()],
            hovertemplate="%{customdata}<extra></extra>",
        )
    count = parts["sample"].nunique()
    figure.update_xaxes(title_text="token of the packed row", range=[0, len(tokens)])
    figure.update_yaxes(autorange="reversed")
    finish(
        figure,
        f"{len(tokens)} tokens: {count} samples, {int(parts['consistency'].sum())} tokens under the consistency loss, {int(parts['ar'].sum())} "
        "under the AR loss. A noisy block shares its positions with the clean one behind it. From packed.parquet.",
        legend="",
    )
    return figure.update_layout(
        barmode="overlay",
        height=170 + 44 * count,
        bargap=0.25,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        yaxis={"showgrid": False},
    )


def _told(row: pd.Series) -> str:
    name = KINDS[row["kind"]][0]
    where = (
        f"{name}, positions {row['positions']}"
        if row["kind"] == 0
        else f"{name} {row['block']}, window {row['window']}, positions {row['positions']}"
    )
    noise = "" if pd.isna(row["noise"]) else f"<br>noise ratio {row['noise']:.2f}"
    text = row["text"] if len(row["text"]) <= 160 else row["text"][:159] + "\u2026"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", "<br>")
    return f"{where}{noise}<br>losses: consistency on {row['consistency']}, AR on {row['ar']} of {row['length']} tokens<br>{text}"


def _upright(names: list[str]) -> int:
    """The angle at which so many names stand beside each other without touching."""
    return 0 if len(names) <= 12 else -90


def attention_mask(tokens: pd.DataFrame, visible: np.ndarray) -> go.Figure:
    """Who may see whom among some tokens of a packed row (the paper's Figure 2).

    Args:
        tokens: as in `packed_sequence`, those of both axes, in order.
        visible: bool [tokens, tokens]; visible[q, k]: may query q see key k?
    """
    parts = segments(tokens.reset_index(drop=True))
    names = [("P", "N", "C")[kind] + ("" if kind == 0 else str(block)) for kind, block in zip(parts["kind"], parts["block"], strict=True)]
    names = [name if length >= _NARROWEST * len(tokens) else "" for name, length in zip(names, parts["length"], strict=True)]
    centres = (parts["start"] + (parts["length"] - 1) / 2).tolist()
    figure = go.Figure(
        go.Heatmap(z=visible.astype(np.uint8), colorscale=[[0, "#ffffff"], [1, "#0b4f8a"]], zmin=0, zmax=1, showscale=False, hoverinfo="skip")
    )
    for edge in parts["start"].iloc[1:]:
        figure.add_hline(y=edge - 0.5, line={"color": "#999999", "width": 1})
        figure.add_vline(x=edge - 0.5, line={"color": "#999999", "width": 1})
    figure.update_xaxes(title_text="key (seen)", tickvals=centres, ticktext=names, side="top", constrain="domain", tickangle=_upright(names))
    figure.update_yaxes(title_text="query (sees)", tickvals=centres, ticktext=names, autorange="reversed", scaleanchor="x", constrain="domain")
    finish(
        figure, "Dark: the token of this row may attend to the one of this column. P: prompt; N and C: noisy and clean blocks. From packed.parquet."
    )
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    return figure.update_layout(height=620, margin={"t": 70})
