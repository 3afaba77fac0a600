"""What the pages share: where things are, a figure with its caption, and a sentence instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import streamlit as st

from dashboards.figures import caption
from dashboards.stored import Stages, Unreadable

PLACES = ("outputs", "tracking_uri", "store")  # what the command line may say, `key=value` after `--`


@dataclass(frozen=True)
class Place:
    """Where runs are recorded and where their stages lie."""

    tracking_uri: str
    stages: Stages


def place(arguments: Sequence[str]) -> Place:
    """Of the app's command line and what the sidebar changed. Raises Unreadable for an argument it does not know."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := given.keys() - set(PLACES):
        raise Unreadable(f"{', '.join(sorted(unknown))}: no such setting of the app; known: {', '.join(PLACES)} (as key=value).")
    outputs = Path(given.get("outputs") or "outputs").expanduser().resolve()
    uri = st.sidebar.text_input("Tracking store", given.get("tracking_uri") or f"sqlite:///{outputs / 'mlflow.db'}")
    store = st.sidebar.text_input("Stage store", given.get("store") or str(outputs / "store"))
    return Place(uri.strip(), Stages(Path(store.strip()).expanduser()))


@contextmanager
def sentences() -> Iterator[None]:
    """What cannot be shown says why, where it would have stood; the rest of the page stays."""
    try:
        yield
    except Unreadable as error:
        st.warning(str(error))


def show(figure: go.Figure, title: str) -> None:
    st.subheader(title, anchor=False)
    st.plotly_chart(figure, theme=None, width="stretch", key=f"figure {title}", config={"displayModeBar": False})
    st.caption(caption(figure))
