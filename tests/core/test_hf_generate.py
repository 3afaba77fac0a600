"""`model.generate(custom_generate=jacobi_generate)` is `model.generate()`, greedy, in fewer forwards; the rest is refused by name."""

from __future__ import annotations

import pytest
import torch

from jacobi_core.decoding.hf_generate import jacobi_generate
from tests.core.tiny import FAMILIES, random_prompts, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["ar", "jacobi", "mr"])
def test_same_text_as_transformers(family, method):
    model = tiny_model(family, seed=3)
    for prompt in random_prompts(5, seed=2):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, do_sample=False, max_new_tokens=30)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, custom_generate=jacobi_generate, method=method, block_size=8
        )
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"do_sample": True}, "greedy"),
        ({"num_beams": 2}, "greedy"),
        ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
        ({"min_new_tokens": 5}, "MinNewTokens|MinLength"),
        ({"max_time": 5.0}, "MaxTime"),
        ({"method": "zigzag"}, "zigzag"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_what_would_change_the_text_is_refused(settings, match):
    model = tiny_model(seed=3)
    with pytest.raises(ValueError, match=match):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=8, custom_generate=jacobi_generate, **{"do_sample": False, **settings})
    with pytest.raises(ValueError, match="one prompt at a time"):
        model.generate(torch.tensor([[5, 6], [7, 8]]), max_new_tokens=8, do_sample=False, custom_generate=jacobi_generate)
