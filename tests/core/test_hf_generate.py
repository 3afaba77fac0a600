"""`model.generate(custom_generate=jacobi_generate)` is `model.generate()` in fewer forwards; what it cannot honour is refused by name."""

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
    "settings", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 12}, {"suppress_tokens": [9, 10, 11, 12]}]
)
@pytest.mark.parametrize("method", ["jacobi", "mr"])
def test_processors_run_on_each_positions_own_prefix(settings, method):
    model = tiny_model(seed=3)
    for prompt in random_prompts(5, seed=2):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, do_sample=False, max_new_tokens=24, **settings)
        found = model.generate(ids, do_sample=False, max_new_tokens=24, custom_generate=jacobi_generate, method=method, block_size=8, **settings)
        assert found.tolist() == expected.tolist()


def test_samples_follow_torchs_seed_and_not_the_method():
    model = tiny_model(seed=3, initializer_range=0.1)
    texts = []
    for seed, method in ((1, "ar"), (1, "mr"), (1, "jacobi"), (2, "mr")):
        torch.manual_seed(seed)
        texts.append(
            model.generate(
                torch.tensor([[5, 6]]), do_sample=True, temperature=0.8, top_p=0.9, max_new_tokens=24, custom_generate=jacobi_generate, method=method
            ).tolist()
        )
    assert texts[0] == texts[1] == texts[2] != texts[3]


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"num_beams": 2}, "num_beams"), ({"method": "zigzag"}, "zigzag"), ({"block_size": 0}, "block_size")],
)
def test_what_cannot_be_honoured_is_refused(settings, match):
    model = tiny_model(seed=3)
    with pytest.raises(ValueError, match=match):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=8, custom_generate=jacobi_generate, **{"do_sample": False, **settings})


@pytest.mark.parametrize("method", ["ar", "mr"])
def test_a_left_padded_batch_is_what_transformers_makes_of_it(method):
    model = tiny_model(seed=3)
    prompts = random_prompts(4, seed=9)
    width = max(map(len, prompts))
    ids = torch.tensor([[3] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)
    found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, custom_generate=jacobi_generate, method=method, block_size=8)
    assert found.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="token_streamer"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, custom_generate=jacobi_generate, token_streamer=object())
