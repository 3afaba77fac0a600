"""Steps of fixed shape on a static cache give what the growing cache gives. What a CUDA graph needs of them holds; capture itself is
tests/gpu's."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings

from jacobi_core.decoding import static_forward
from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.static_forward import StaticForward, widths_for
from tests.core.loop import COPYING, decode, decodings, same_as_growing_cache
from tests.core.tiny import FAMILIES, tiny_model

MODELS = {family: tiny_model(family, seed=1) for family in FAMILIES}
EVERYTHING = DecodingConfig(method=Method.mr, block_size=8, max_new_tokens=60, ngram=True, spawn_ratio=0.2)


def static(model, config, prompt_tokens):
    return StaticForward(model, capacity=prompt_tokens + config.max_new_tokens, widths=widths_for(config))


@settings(max_examples=80, deadline=None)
@given(drawn=decodings())
def test_same_text_as_the_growing_cache(drawn):
    family, prompt, config = drawn
    model = MODELS[family]
    same_as_growing_cache(model, static(model, config, len(prompt)), prompt, config)


@pytest.mark.parametrize("long_prompt", [False, True])
@pytest.mark.parametrize("method", list(Method))
def test_few_shapes_and_one_allocation(monkeypatch, method, long_prompt):
    """After the prefill the model sees at most three shapes, all of them planned, and always the same memory."""
    if long_prompt:
        monkeypatch.setattr(static_forward, "SHORT_PROMPT", 1)
    model = tiny_model(seed=1)
    n = 1 if method is Method.ar else 8
    config = DecodingConfig(method=method, block_size=n, max_new_tokens=80, ngram=method is Method.mr, spawn_ratio=0.2)
    forward = static(model, config, len(COPYING))
    shapes, addresses, bytes_held = [], set(), set()

    def record(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        shapes.append((tuple(kwargs["input_ids"].shape), None if mask is None else (tuple(mask.shape), mask.data_ptr())))

    def look(module, args, kwargs, output):
        held = [tensor for layer in forward.cache.layers for tensor in (layer.keys, layer.values)]
        addresses.add(tuple(tensor.data_ptr() for tensor in held))
        bytes_held.add(sum(tensor.untyped_storage().nbytes() for tensor in held))

    model.register_forward_pre_hook(record, with_kwargs=True)
    model.register_forward_hook(look, with_kwargs=True)
    generation = decode(model, forward, COPYING, config)
    seen = list(shapes)
    assert generation.new_tokens.tolist() == decode(model, CachedForward(model), COPYING, config).new_tokens.tolist()
    if long_prompt:
        assert len(seen) == generation.stats.forwards + 1  # the prompt has one of its own
        assert seen[0] == ((1, len(COPYING) - 1), None)  # plainly causal: no mask, so flash kernels may run
    else:
        assert len(seen) == generation.stats.forwards
        assert seen[0][0] == (1, generation.stats.fed_per_forward[0])
    steps = set(seen[1:])
    assert {ids[1] for ids, _ in steps} <= set(widths_for(config))
    assert 1 <= len(steps) == len({ids for ids, _ in steps}) <= 3
    assert len(addresses) == 1
    columns = -(-(len(COPYING) + 80 + widths_for(config)[-1]) // 64) * 64
    assert bytes_held == {2 * 2 * 2 * columns * 8 * 8}  # layers x (keys, values) x heads x columns x head_dim x fp64: candidates add none


def test_a_compiled_model_is_compiled_once_per_width():
    model = tiny_model(seed=1)
    forward = static(model, EVERYTHING, len(COPYING))
    graphs, calls = [], []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    eager, compiled, widths = model.forward, torch.compile(model.forward, backend=count, fullgraph=True, dynamic=False), set()

    def prefill_eagerly(**kwargs):
        calls.append(kwargs)
        if len(calls) == 1:
            return eager(**kwargs)
        widths.add(kwargs["input_ids"].shape[1])
        return compiled(**kwargs)

    model.forward = prefill_eagerly
    found = decode(model, forward, COPYING, EVERYTHING)
    del model.forward
    assert found.new_tokens.tolist() == decode(model, CachedForward(model), COPYING, EVERYTHING).new_tokens.tolist()
    assert len(graphs) == len(widths) > 1


def test_nothing_forgotten_is_ever_read():
    """Rejected tokens, padding and the text before stay in the buffers: spoil them after every step."""
    model = MODELS["qwen3"]
    forward = static(model, EVERYTHING, len(COPYING))
    keep = forward.keep

    def spoiled(verdicts):
        keep(verdicts)
        for layer in forward.cache.layers:
            layer.keys[:, :, forward.length :] = 1e3
            layer.values[:, :, forward.length :] = 1e3

    forward.keep = spoiled
    with torch.inference_mode():
        forward.logits_of([([50, 51, 52], [[53]])])  # a text left before its end
    forward.restart()
    for prompt in (COPYING, [11, 12], [30]):  # one after the other on the same buffers
        expected = decode(model, CachedForward(model), prompt, EVERYTHING)
        assert decode(model, forward, prompt, EVERYTHING).new_tokens.tolist() == expected.new_tokens.tolist()


def test_capture_that_fails_is_logged_once_and_decoding_goes_on(monkeypatch, caplog):
    model = MODELS["llama"]
    expected = decode(model, CachedForward(model), COPYING, EVERYTHING)
    tried = []

    def refuse(self, step):
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing\nlong trace")

    monkeypatch.setattr(StaticForward, "_capture", refuse)
    static_forward._warn_once.cache_clear()
    for _ in range(2):
        forward = static(model, EVERYTHING, len(COPYING))
        forward._captures = True
        with caplog.at_level(logging.WARNING):
            assert decode(model, forward, COPYING, EVERYTHING).new_tokens.tolist() == expected.new_tokens.tolist()
    assert len(tried) == 2  # once per forward, not once per step
    assert [r.message for r in caplog.records] == [
        "decoding steps cannot be captured in a CUDA graph, they run eagerly and slower: operation not permitted when stream is capturing"
    ]


def test_every_width_can_be_captured_before_the_first_text(monkeypatch):
    model, captured = MODELS["llama"], []
    forward = static(model, EVERYTHING, len(COPYING))
    forward.capture()
    assert not forward._steps  # nothing to capture here

    def capture(step):
        captured.append(step.mask.shape[2])
        step.graph = type("Graph", (), {"replay": lambda self: None})()
        step.logits = torch.zeros(step.mask.shape[2], 1)

    forward._captures = True
    monkeypatch.setattr(forward, "_capture", capture)
    forward.capture()
    forward.capture()
    assert captured == list(widths_for(EVERYTHING))
    forward._captures = False
    forward._steps.clear()
    expected = decode(model, CachedForward(model), COPYING, EVERYTHING).new_tokens.tolist()
    assert decode(model, forward, COPYING, EVERYTHING).new_tokens.tolist() == expected  # what was fed is forgotten


def test_compiled_steps_give_the_same_text():
    model = MODELS["llama"]
    config = DecodingConfig(method=Method.recycling, block_size=4, max_new_tokens=30)
    forward = StaticForward(model, capacity=60, widths=(widths_for(config)[-1],), compiled=True)
    for prompt in (COPYING, [11, 12]):
        expected = decode(model, CachedForward(model), prompt, config)
        assert decode(model, forward, prompt, config).new_tokens.tolist() == expected.new_tokens.tolist()


def test_steps_that_do_not_compile_run_eagerly_and_say_so(monkeypatch, caplog):
    model = MODELS["llama"]

    def broken(model, dynamic):
        def refuse(**inputs):
            raise RuntimeError("no C++ compiler\nlong trace")

        return refuse

    monkeypatch.setattr(torch, "compile", broken)
    static_forward._warn_once.cache_clear()
    forward = StaticForward(model, capacity=80, widths=widths_for(EVERYTHING), compiled=True)
    with caplog.at_level(logging.WARNING):
        found = decode(model, forward, COPYING, EVERYTHING)
    assert found.new_tokens.tolist() == decode(model, CachedForward(model), COPYING, EVERYTHING).new_tokens.tolist()
    assert [r.message for r in caplog.records] == ["decoding steps cannot be compiled, they run eagerly and slower: no C++ compiler"]


def test_eager_attention():
    model = tiny_model("llama", seed=5, dtype=torch.float32)
    expected = decode(model, CachedForward(model), COPYING, EVERYTHING)
    model.set_attn_implementation("eager")
    assert decode(model, static(model, EVERYTHING, len(COPYING)), COPYING, EVERYTHING).new_tokens.tolist() == expected.new_tokens.tolist()


def test_refusals_name_the_cause():
    sliding = tiny_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_window"):
        StaticForward(sliding, capacity=8, widths=(4,))
    forward = StaticForward(MODELS["qwen2"], capacity=8, widths=(4,))
    with torch.inference_mode():
        for request in ([5], [[6] * 4]), ([5] * 9, [[]]):
            with pytest.raises(ValueError, match="capacity=8 and widths="):
                forward.logits_of([request])


def test_widths():
    assert widths_for(DecodingConfig(method=Method.ar, block_size=1)) == (1,)
    assert widths_for(DecodingConfig(block_size=64)) == (32, 64)
    assert widths_for(DecodingConfig(method=Method.mr)) == (64, 255, 509)
    assert widths_for(DecodingConfig(method=Method.mr, max_new_tokens=3)) == (5, 9)
    assert widths_for(DecodingConfig(method=Method.running_window, block_size=6, auto=True)) == (1, 2, 4, 8)
