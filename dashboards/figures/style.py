"""What all figures share: how a model looks, the plain template, and the caption a figure carries with it."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go

GRID = "#e5e5e5"
# Told apart by marker and dash; the colours (Okabe and Ito's) only help.
LOOKS = [
    ("#222222", "circle", "solid"),
    ("#0072b2", "square", "dash"),
    ("#d55e00", "diamond", "dot"),
    ("#cc79a7", "cross", "longdash"),
    ("#7f7f7f", "star", "longdashdot"),
    ("#009e73", "triangle-up", "dashdot"),
]
_BASELINE = LOOKS[5]
FILLINGS = ("", "-open", "-dot", "-open-dot")


def model_look(model: str, variant: int = 0) -> dict[str, dict[str, object]]:
    """Marker and line of a model, the same in every figure: the base, up to four rounds (then again from the first), and every baseline.

    variant: tells its decoding methods apart by how the marker is filled.
    """
    number = model.removeprefix("round")
    return look(LOOKS[0] if model == "base" else LOOKS[1 + (int(number) - 1) % 4] if number.isdecimal() else _BASELINE, variant)


def numbered_look(number: int) -> dict[str, dict[str, object]]:
    """Marker and line of the number-th of any series; 24 differ."""
    return look(LOOKS[number % len(LOOKS)], number // len(LOOKS))


def look(style: tuple[str, str, str], variant: int = 0) -> dict[str, dict[str, object]]:
    color, symbol, dash = style
    return {"marker": {"color": color, "symbol": symbol + FILLINGS[variant % 4], "size": 9}, "line": {"color": color, "dash": dash, "width": 2}}


def finish(figure: go.Figure, caption: str, *, legend: str = "model") -> go.Figure:
    """caption: what is shown, and which file it comes from."""
    figure.update_layout(
        template="simple_white", height=420, margin={"l": 70, "r": 20, "t": 20, "b": 60}, legend_title_text=legend, meta={"caption": caption}
    )
    figure.update_xaxes(showgrid=True, gridcolor=GRID)
    figure.update_yaxes(showgrid=True, gridcolor=GRID)
    return figure


def caption(figure: go.Figure) -> str:
    """What a figure shows, and where its numbers come from."""
    return figure.layout.meta["caption"]


def described(figure: go.Figure, title: str, text: str | None = None) -> str:
    """The figure as HTML that says in words what it shows, for those who do not see it; Plotly's script must be on the page.

    text: by default the figure's own caption.
    """
    text = caption(figure) if text is None else text
    chart = figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})
    label = escape(f"{title}. {text}", quote=True)
    return f'<figure><div role="img" aria-label="{label}">{chart}</div><figcaption>{escape(text)}</figcaption></figure>'
