"""AR and parallel decoding of one prompt, live and side by side, with every knob of the decoder; what the knobs did stays in a table."""

from __future__ import annotations

import time
from typing import Any

import pandas as pd
import streamlit as st

from dashboards import figures, stored
from dashboards.race import STYLE, Decoder, ar_of, clock_html, encode, legend_html, load, race, text_html
from dashboards.stored import Unreadable
from dashboards.views.common import Place, sentences, show
from jacobi_core.decoding.config import DecodingConfig, Method

REDRAW_SECONDS = 0.1
OTHER = "another folder"
SLOWER = (1, 5, 20, 100)
PROMPTS = 20  # of the store's own to choose from


@st.cache_resource(show_spinner="Loading the model", max_entries=2)
def _model(folder: str, dtype: str, changed: float) -> tuple[Any, Any]:
    """changed: the folder's time, so that a checkpoint made again is loaded again."""
    return load(folder, dtype=dtype)


def page(place: Place) -> None:
    st.title("Side by side", anchor=False)
    with sentences():
        folder, dtype = _choose_model(place)
        prompt = _choose_prompt(place)
        config, slower = _knobs()
        if st.button("Decode", type="primary"):
            _decode(folder, dtype, prompt, config, slower)
        elif "decoded" in st.session_state:
            _columns(st.session_state["decoded"])
        if "decoded" in st.session_state:
            _after(st.session_state["decoded"])


def _choose_model(place: Place) -> tuple[str, str]:
    made, how = st.columns([3, 1])
    models = place.stages.titled(stored.models(place.stages))
    chosen = made.selectbox("Model", [*models, OTHER])
    dtype = how.selectbox("Precision", ["float32", "bfloat16", "float64"])
    if chosen != OTHER:
        return str(models[chosen]), dtype
    if not models:
        st.info(f"{place.stages.root} holds no model yet; a pipeline makes some (make quickstart), or name a checkpoint folder.")
    return st.text_input("Checkpoint folder").strip(), dtype


def _choose_prompt(place: Place) -> str:
    found = place.stages.named("prompts")
    own: list[str] = []
    if found:
        with sentences():
            own = stored.prompts(found[0], "test", PROMPTS) or stored.prompts(found[0], "train", PROMPTS)
    chosen = st.selectbox("Prompt of the newest prompts stage", own, format_func=lambda text: text[:120]) if own else ""
    return st.text_area("Prompt", chosen, height=90)


def _knobs() -> tuple[DecodingConfig, float]:
    """Raises Unreadable for settings that do not go together."""
    default = DecodingConfig()
    a, b, c, d = st.columns(4)
    given: dict[str, Any] = {
        "method": a.selectbox("Method", [m for m in Method if m is not Method.ar], format_func=lambda m: m.value),
        "block_size": b.number_input("Block size", 1, 1024, 32),
        "max_new_tokens": c.number_input("Most new tokens", 1, 4096, 128),
    }
    slower = d.selectbox("Shown", SLOWER, index=1, format_func=lambda times: "at its own speed" if times == 1 else f"{times} times slower")
    with st.expander("More knobs"):
        a, b, c, d = st.columns(4)
        given |= {
            "max_blocks": a.number_input("Blocks in flight (multi_block, mr)", 1, 16, default.max_blocks),
            "spawn_ratio": b.number_input("Spawn ratio (multi_block, mr)", 0.05, 1.0, default.spawn_ratio, step=0.05),
            "verification_size": c.number_input("Chains verified in one forward", 1, 64, default.verification_size),
            "pool_size": d.number_input("Rejected drafts kept (recycling, mr)", 0, 256, default.pool_size),
            "drafts": a.number_input("Drafts side by side (not jacobi)", 1, 16, default.drafts),
            "ngram": b.checkbox("Copy n-grams of the text", default.ngram),
            "auto": c.checkbox("Feed only what pays here (not jacobi)", default.auto),
            "seed": d.number_input("Seed", 0, 2**31, default.seed),
            "temperature": a.number_input("Temperature (0: greedy)", 0.0, 5.0, default.temperature, step=0.1),
            "top_k": b.number_input("Top k", 0, 1000, default.top_k),
            "top_p": c.number_input("Top p", 0.01, 1.0, default.top_p, step=0.05),
            "min_p": d.number_input("Min p", 0.0, 1.0, default.min_p, step=0.01),
        }
    try:
        return DecodingConfig(**given), slower
    except ValueError as error:
        raise Unreadable(f"These settings do not go together: {error}") from error


def _name(config: DecodingConfig) -> str:
    """The method and block size, and what else differs from the default."""
    default, shown = DecodingConfig(), ("max_blocks", "spawn_ratio", "verification_size", "pool_size", "drafts", "ngram", "auto", "temperature")
    changed = [f"{name}={getattr(config, name)}" for name in shown if getattr(config, name) != getattr(default, name)]
    return ", ".join([f"{config.method.value}@{config.block_size}", *changed])


def _decode(folder: str, dtype: str, prompt: str, config: DecodingConfig, slower: float) -> None:
    if not prompt.strip():
        raise Unreadable("The prompt is empty; write something.")
    if not folder:
        raise Unreadable("No model is chosen: name a checkpoint folder.")
    st.session_state.pop("decoded", None)
    model, tokenizer = _model(folder, dtype, stored.changed(folder))
    ids = encode(tokenizer, prompt)
    decoders = [Decoder("greedy AR" if config.temperature == 0 else "AR, sampling", ar_of(config)), Decoder(_name(config), config)]
    draw, drawn = _columns(decoders), 0.0
    try:
        for _ in race(model, tokenizer, ids, decoders, slower=slower):
            if time.monotonic() - drawn >= REDRAW_SECONDS:
                draw()
                drawn = time.monotonic()
    except ValueError as error:
        raise Unreadable(f"The decoder refuses this: {error}") from error
    draw()
    st.session_state["decoded"] = decoders
    st.session_state.setdefault("history", []).insert(0, _row(folder, decoders))


def _columns(decoders: list[Decoder]) -> Any:
    """Both decoders beside each other; returns what draws them again."""
    st.html(STYLE + legend_html())
    places = []
    for column, decoder in zip(st.columns(2), decoders, strict=True):
        column.subheader(decoder.name, anchor=False)
        places.append((column.empty(), column.empty()))

    def draw() -> None:
        for (clock, text), decoder in zip(places, decoders, strict=True):
            clock.html(STYLE + clock_html(decoder))
            text.html(STYLE + text_html(decoder))

    draw()
    return draw


def _row(folder: str, decoders: list[Decoder]) -> dict[str, Any]:
    ar, parallel = decoders
    same = ar.generation.new_tokens.tolist() == parallel.generation.new_tokens.tolist()
    return {
        "setting": parallel.name,
        "model": folder.rsplit("/", 1)[-1],
        "tokens": len(parallel.tokens),
        "forwards": len(parallel.committed),
        "TPF": f"{parallel.tpf:.2f}",
        "tokens/s": f"{parallel.tokens_per_second:.0f}",
        "AR tokens/s": f"{ar.tokens_per_second:.0f}",
        "speedup": f"{parallel.tokens_per_second / ar.tokens_per_second:.2f}",
        "same tokens": "yes" if same else "no",
    }


def _after(decoders: list[Decoder]) -> None:
    last = st.session_state["history"][0]
    if last["same tokens"] == "yes":
        st.success(f"Both answers are equal, token for token. Speedup {last['speedup']} on this prompt.")
    else:
        st.warning("The answers differ; `python -m pipelines.doctor` tells a rounding tie from a defect.")
    forwards = [{"name": d.name, "committed": count, "source": source} for d in decoders for count, source in d.committed]
    show(figures.accepted_along(pd.DataFrame(forwards)), "Accepted tokens per forward along the answer")
    st.subheader("What the knobs did", anchor=False)
    st.table(pd.DataFrame(st.session_state["history"]).set_index("setting"))
    st.caption("One prompt each, timed once: a look, no measurement. The newest first.")
