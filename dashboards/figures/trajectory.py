"""The trajectory of one block (the paper's Figure 4): positions across, Jacobi iterations down, each token's text in its cell."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dashboards.figures.style import finish

# Status of a token in a state, and its shade: apart in grey as well. The text in a cell is white on the darkest, else black.
STATUSES = {"wrong": "#ffffff", "passing": "#e9e4d4", "stationary": "#f0b060", "accepted": "#0b4f8a"}
_NAMES = {
    "wrong": "wrong",
    "passing": "right, but changes again",
    "stationary": "stationary: right and stays, not accepted yet",
    "accepted": "accepted: equal to the fixed point up to here",
}
SHORTEST_RUN = 3  # right but unaccepted tokens in a row, to be worth a frame (paper: "more than three" is drawn in red; here from three on)
_FRAME = {"color": "#c00000", "width": 3}
_WIDTH = 1100  # pixels for all cells together, about; decides how much of a text fits
_ROW = 30  # pixels


def token_statuses(tokens: pd.DataFrame) -> list[str]:
    """The status of every row of `tokens` (columns `iteration, position, id`), the last iteration being the fixed point; see STATUSES."""
    grid = tokens.pivot(index="iteration", columns="position", values="id")
    right = grid.eq(grid.iloc[-1], axis="columns")
    accepted = right.cummin(axis="columns")
    stays = right.iloc[::-1].cummin().iloc[::-1]
    status = pd.DataFrame("wrong", index=grid.index, columns=grid.columns).mask(right, "passing").mask(stays, "stationary").mask(accepted, "accepted")
    return [status.at[i, p] for i, p in zip(tokens["iteration"], tokens["position"], strict=True)]


def trajectory(tokens: pd.DataFrame) -> go.Figure:
    """One block's states from the first guess to the fixed point.

    Args:
        tokens: one row per state and position (columns `iteration, position, id, text`), both counted from 0; the last iteration is the fixed point.
    """
    tokens = tokens.assign(status=token_statuses(tokens))
    codes = {status: code for code, status in enumerate(STATUSES)}
    grid = tokens.assign(code=tokens["status"].map(codes)).pivot(index="iteration", columns="position", values=["code", "text", "status"])
    positions = grid["code"].columns.tolist()
    fits = max(1, _WIDTH // max(8, len(positions)) // 8)  # characters, of about 8 pixels
    figure = go.Figure(
        go.Heatmap(
            x=positions,
            y=grid.index,
            z=grid["code"].astype(int).to_numpy(),
            text=[[_cell(text, fits) for text in row] for row in grid["text"].to_numpy()],
            customdata=[
                [[_visible(t), _NAMES[s]] for t, s in zip(*row, strict=True)] for row in zip(grid["text"].values, grid["status"].values, strict=True)
            ],
            texttemplate="%{text}",
            textfont={"size": 12, "family": "monospace"},
            hovertemplate="iteration %{y}, position %{x}<br>%{customdata[0]}<br>%{customdata[1]}<extra></extra>",
            colorscale=[[edge, color] for code, color in enumerate(STATUSES.values()) for edge in (code / 4, (code + 1) / 4)],
            zmin=-0.5,
            zmax=3.5,
            showscale=False,
            xgap=1,
            ygap=1,
        )
    )
    for status, color in STATUSES.items():
        if status in set(tokens["status"]):
            figure.add_scatter(
                x=[None], y=[None], name=_NAMES[status], mode="markers", marker={"symbol": "square", "size": 13, "color": color, "line": {"width": 1}}
            )
    runs = right_runs(tokens)
    for iteration, start, end in runs:
        figure.add_shape(
            type="rect",
            x0=start - 0.46,
            x1=end + 0.46,
            y0=iteration - 0.44,
            y1=iteration + 0.44,
            line=_FRAME,
            fillcolor="rgba(0,0,0,0)",
            opacity=1,
        )
    if runs:
        name = f"{SHORTEST_RUN} or more right in a row, not accepted yet"
        figure.add_scatter(
            x=[None], y=[None], name=name, mode="markers", marker={"symbol": "square-open", "size": 13, "line": _FRAME, "color": _FRAME["color"]}
        )
    figure.update_xaxes(title_text="position in the block", dtick=max(1, len(positions) // 16), side="top")
    figure.update_yaxes(title_text="forwards so far", autorange="reversed", dtick=1)
    finish(
        figure,
        f"One block while Jacobi decoding refines it, from the first guess (iteration 0) to the fixed point, which is greedy AR's text. "
        f"{len(runs)} runs of {SHORTEST_RUN} or more right but unaccepted tokens are framed. From part-*.parquet of a trajectories stage.",
        legend="",
    )
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    legend = {"orientation": "h", "y": 0, "yanchor": "top"}
    return figure.update_layout(height=170 + _ROW * max(len(grid), 4), legend=legend, margin={"t": 70}, plot_bgcolor="#bbbbbb")


def right_runs(tokens: pd.DataFrame) -> list[tuple[int, int, int]]:
    """`(iteration, first position, last position)` of SHORTEST_RUN or more right but unaccepted tokens in a row (columns as in `trajectory`, and
    `status`)."""
    found = []
    for iteration, group in tokens.sort_values("position").groupby("iteration"):
        right = group["status"].isin(["passing", "stationary"])
        for _, run in group[right].groupby((right != right.shift()).cumsum()[right]):
            if len(run) >= SHORTEST_RUN:
                found.append((int(iteration), int(run["position"].iloc[0]), int(run["position"].iloc[-1])))
    return found


def _visible(text: str) -> str:
    """With its blanks to be seen, and no tag that Plotly would obey."""
    shown = text.replace(" ", "\u00b7").replace("\n", "\u23ce").replace("\t", "\u21e5")
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cell(text: str, fits: int) -> str:
    return _visible(text if len(text) <= fits else text[: max(1, fits - 1)] + "\u2026")
