"""A packed training row and its attention mask."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from dashboards import figures
from dashboards.stored import Packed, Unreadable
from dashboards.views.common import Place, sentences, show

MOST_TOKENS = 600  # drawn of a mask: more cannot be told apart
MASKS = {"nc": "NC: a noisy block sees the window's earlier noisy blocks", "nc_ic": "NC-IC: it sees the earlier clean blocks instead"}


def page(place: Place) -> None:
    st.title("Packed rows", anchor=False)
    with sentences():
        folders = place.stages.named("pack")
        if not folders:
            raise Unreadable(f"{place.stages.root} holds no pack stage: no pipeline got that far, or the store lies elsewhere (see the sidebar).")
        titles = place.stages.titled(folders)
        folder = titles[st.selectbox("Stage", list(titles))]
        packed = Packed.read(folder)
        if not packed.rows:
            raise Unreadable(f"{folder} holds no row: no sample fitted into one.")
        row = st.number_input("Row", 1, packed.rows, 1) - 1
        tokens = packed.tokens(row, place.stages.token_text(folder))
        show(figures.packed_sequence(tokens), f"Row {row + 1}: what is fed")
        which, how = st.columns(2)
        sample = which.selectbox("Sample", sorted(tokens["sample"].unique().tolist()))
        variant = how.selectbox("Mask", list(MASKS), format_func=MASKS.get)
        part = tokens[tokens["sample"] == sample]
        if len(part) > MOST_TOKENS:
            st.info(f"The sample has {len(part)} tokens; the first {MOST_TOKENS} are drawn.")
        part = part.head(MOST_TOKENS)
        show(figures.attention_mask(part, _visible(part, variant)), f"Row {row + 1}, sample {sample}: who sees whom")


def _visible(tokens: pd.DataFrame, variant: str) -> np.ndarray:
    """By the one rule that training uses."""
    from jacobi_core.distillation.attention_variant import MaskVariant
    from jacobi_core.distillation.visibility import TokenFields, visible

    fields = TokenFields(*(tokens[name].to_numpy() for name in ("sample", "kind", "block", "window", "position")))
    queries, keys = fields.map(lambda f: f[:, None]), fields.map(lambda f: f[None, :])
    return visible(queries=queries, keys=keys, variant=MaskVariant(variant))
