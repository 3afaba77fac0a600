"""The decoding loop with a forward of the test's choice, and drawn settings to compare two forwards under."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.forwards import Forward
from jacobi_core.decoding.generate import Row, decode_rows
from jacobi_core.decoding.stats import Generation
from tests.core.tiny import FAMILIES, random_prompts, tiny_rules

COPYING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 10, 5, 6]  # n-gram candidates in the first forward


def same_as_growing_cache(model: PreTrainedModel, forward: Forward, prompt: list[int], config: DecodingConfig) -> None:
    """Tokens and statistics."""
    found, expected = decode(model, forward, prompt, config), decode(model, CachedForward(model), prompt, config)
    assert found.new_tokens.tolist() == expected.new_tokens.tolist()
    assert found.stats == expected.stats


@st.composite
def decodings(draw: st.DrawFn) -> tuple[str, list[int], DecodingConfig]:
    """A family of tiny models, a prompt and a config of any method."""
    method = draw(st.sampled_from(list(Method)))
    seed = draw(st.integers(0, 1000))
    prompt = COPYING if draw(st.booleans()) else random_prompts(1, seed=seed)[0]
    config = DecodingConfig(
        method=method,
        block_size=1 if method is Method.ar else draw(st.sampled_from([1, 2, 3, 8, 17])),
        max_new_tokens=draw(st.integers(1, 40)),
        seed=seed,
        max_blocks=draw(st.sampled_from([1, 2, 3])),
        spawn_ratio=draw(st.sampled_from([0.2, 0.85])),
        verification_size=draw(st.integers(2, 5)),
        ngram=method is not Method.ar and draw(st.booleans()),
        drafts=1 if method in (Method.ar, Method.jacobi) else draw(st.sampled_from([1, 2])),
    )
    return draw(st.sampled_from(list(FAMILIES))), prompt, config


def decode(model: PreTrainedModel, forward: Forward, prompt: list[int], config: DecodingConfig, *, eos_ids: tuple[int, ...] = (10, 20)) -> Generation:
    row = Row.make(model, torch.tensor(prompt), config, tiny_rules(model, eos_ids=eos_ids))
    return decode_rows(forward, [row])[0]
