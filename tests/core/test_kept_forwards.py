"""`model.generate` on CUDA goes on with the forwards of earlier calls. Here their eager twins: who gets which, and that the text stays."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from jacobi_core.decoding import kept_forwards
from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.hf_generate import jacobi_generate
from jacobi_core.decoding.kept_forwards import MOST, STEP, borrowed_forward
from tests.core.tiny import random_prompts, tiny_model

CONFIG = DecodingConfig(method=Method.mr, block_size=8, max_new_tokens=20)


@pytest.fixture(autouse=True)
def made(monkeypatch) -> list:
    """Capacities of the forwards made."""
    made, original = [], kept_forwards.StaticForward

    def make(model, *, capacity, widths):
        made.append(capacity)
        return original(model, capacity=capacity, widths=widths)

    monkeypatch.setattr(kept_forwards, "StaticForward", make)
    monkeypatch.setattr(kept_forwards, "is_static", lambda model: True)
    return made


def decode(model, prompt, **more):
    ids = torch.tensor([prompt])
    return model.generate(ids, do_sample=False, max_new_tokens=20, custom_generate=jacobi_generate, block_size=8, **more)[0].tolist()


def plain(model, prompt):
    return model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0].tolist()


def test_one_forward_serves_texts_of_many_lengths(made):
    model = tiny_model(seed=3)
    for prompt in random_prompts(6, seed=2):
        assert decode(model, prompt) == plain(model, prompt)
    assert made == [STEP]
    decode(model, [5, 6], method="ar")  # other widths
    assert made == [STEP, STEP]


def test_a_call_inside_a_call_gets_another_one(made):
    model, inner = tiny_model(seed=3), []
    one, other = random_prompts(2, seed=4)

    class Asks(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            inner.append(decode(model, other))
            return torch.zeros(1, dtype=torch.bool)

    assert decode(model, one, stopping_criteria=StoppingCriteriaList([Asks()])) == plain(model, one)
    assert inner and all(text == plain(model, other) for text in inner)
    assert len(made) == 2


def test_a_text_that_was_broken_off_leaves_nothing_behind(made):
    class Breaks(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            if input_ids.shape[1] > 9:
                raise KeyboardInterrupt
            return torch.zeros(1, dtype=torch.bool)

    model = tiny_model(seed=3)
    with pytest.raises(KeyboardInterrupt):
        decode(model, [5, 6, 7], stopping_criteria=StoppingCriteriaList([Breaks()]))
    assert decode(model, [8, 9]) == plain(model, [8, 9]) and made == [STEP]


def test_kept_no_longer_than_the_model():
    model = tiny_model(seed=3)
    with borrowed_forward(model, CONFIG, 40) as forward:
        held = weakref.ref(forward)
    gone = weakref.ref(model)
    del model, forward
    gc.collect()
    assert gone() is None and held() is None


def test_a_graph_outlives_nothing_that_it_has_baked_in(made):
    model = tiny_model(seed=3)

    def borrow():
        with borrowed_forward(model, CONFIG, 40) as forward:
            return forward

    first = borrow()
    assert borrow() is first
    weight = model.model.embed_tokens.weight
    weight.data = weight.data.clone()  # as after model.to("cpu").to("cuda")
    second = borrow()
    assert second is not first and borrow() is second
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert type(borrow()) is CachedForward  # what forward_for takes on this machine
    handle.remove()
    model.model.layers[0]._disable_adapters = False  # as a layer of peft has it
    assert type(borrow()) is CachedForward
    assert made == [STEP, STEP]


def test_few_are_kept(made):
    model = tiny_model(seed=3)
    for capacity in range(1, 3 * MOST * STEP, STEP):
        with borrowed_forward(model, CONFIG, capacity):
            pass
    assert len(made) == 3 * MOST and len(kept_forwards._KEPT[model]) == MOST
