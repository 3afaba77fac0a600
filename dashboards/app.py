"""`make dashboard`, that is `streamlit run dashboards/app.py -- outputs=DIR`: runs, trajectories, packed rows, and live decoding.

Reads the tracking store by MLflow's client and stage folders by their documented schema; writes nothing. Loopback only and without telemetry by
`.streamlit/config.toml` beside this file. `tracking_uri=` and `store=` name places that are not below `outputs`.
"""

from __future__ import annotations

import os
import sys
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: a folder that is not there is never looked for elsewhere

import streamlit as st

from dashboards.stored import Unreadable
from dashboards.views import live, packed, runs, trajectories
from dashboards.views.common import place

PAGES = (  # title, address, what draws it
    ("Runs", "runs", runs.page),
    ("Trajectories", "trajectories", trajectories.page),
    ("Packed rows", "packed", packed.page),
    ("Side by side", "live", live.page),
)


def main(arguments: list[str]) -> None:
    st.set_page_config(page_title="Jacobi Forcing", layout="wide")
    try:
        where = place(arguments)
    except Unreadable as error:
        st.error(str(error))
        return
    pages = [st.Page(partial(draw, where), title=title, url_path=url, default=url == "runs") for title, url, draw in PAGES]
    st.navigation(pages).run()


main(sys.argv[1:])
