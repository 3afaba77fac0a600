"""How long a text may be, as different checkpoints say it."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, Qwen2Config

from jacobi_core.decoding.context import context_of, stated_context

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 32_768, "rope_scaling": YARN}, 131_072),  # as Qwen2.5's card asks for
        ({"max_position_embeddings": 131_072, "rope_scaling": YARN}, 131_072),
        ({"max_position_embeddings": 32_768, "rope_parameters": {"rope_type": "yarn", "factor": 2}}, 65_536),
        ({"max_position_embeddings": 131_072, "rope_parameters": {**YARN, "rope_type": "llama3", "original_max_position_embeddings": 8192}}, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),  # nobody says of what
        ({"max_position_embeddings": 4096, "rope_parameters": {"full_attention": YARN, "sliding_attention": None}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", "factor": None, "original_max_position_embeddings": 64}}, 4096),
    ],
)
def test_a_config_says_how_long_a_text_may_be(config: dict, tokens: int | None):
    assert stated_context(config) == tokens


def test_what_transformers_makes_of_a_config_says_the_same():
    assert context_of(LlamaConfig(max_position_embeddings=77)) == 77
    scaled = Qwen2Config(max_position_embeddings=1000, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    assert context_of(scaled) == stated_context(scaled.to_dict()) == 4000
