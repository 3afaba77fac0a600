"""Any trajectory of any stage, block by block (the paper's Figure 4)."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import figures
from dashboards.stored import TrajectoryPart, Unreadable
from dashboards.views.common import Place, sentences, show


@st.cache_resource(show_spinner="Reading trajectories", max_entries=4)
def _part(path: Path, changed: float) -> TrajectoryPart:
    """changed: the file's time, so that a stage computed again is read again."""
    return TrajectoryPart.read(path)


def page(place: Place) -> None:
    st.title("Trajectories", anchor=False)
    with sentences():
        folders = place.stages.named("trajectories")
        if not folders:
            raise Unreadable(
                f"{place.stages.root} holds no trajectories stage: no pipeline got that far, or the store lies elsewhere (see the sidebar)."
            )
        titles = place.stages.titled(folders)
        folder = titles[st.selectbox("Stage", list(titles))]
        parts = sorted(folder.glob("part-*.parquet"))
        if not parts:
            raise Unreadable(f"{folder} holds no part-*.parquet yet: the stage has finished no shard, or its files were deleted.")
        where, which, at = st.columns(3)
        path = where.selectbox("Part", parts, format_func=lambda path: path.name)
        part = _part(path, path.stat().st_mtime)
        if not len(part.rows):
            raise Unreadable(f"{path.name} holds no trajectory: every prompt of its shard was dropped or quarantined.")
        row = which.number_input("Trajectory", 1, len(part.rows), 1) - 1
        facts = part.rows.iloc[row]
        block = at.number_input("Block", 1, int(facts["blocks"]), 1) - 1
        text = place.stages.token_text(folder)
        st.caption(
            f"Prompt id {facts['id']}, {facts['answer_tokens']} answer tokens in {facts['blocks']} blocks of {facts['block_size']}, stopped by "
            f"{facts['stop_reason']}; at most {facts['most_iterations']} forwards for a block."
        )
        if part.collect == "schedule":
            st.info(
                "This stage kept only the state that each block's noise schedule asked for (collect=schedule): one row, and the fixed point below it."
            )
        if text is None:
            st.info("The prompts stage of this run, which holds the tokenizer, is not in the store: token ids are shown instead of texts.")
        prompt, answer = part.texts(row, text)
        with st.expander("Prompt and answer"):
            st.text(prompt)
            st.text(answer)
        show(figures.trajectory(part.block(row, block, text)), f"Block {block + 1} of trajectory {row + 1}")
