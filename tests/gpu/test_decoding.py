"""Decoding's forwards on a CUDA device: captured graphs, bf16, flash-attn, compiled flex. Never run so far: no such device was at hand;
tests/core holds the same steps, uncaptured, on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from jacobi_core.decoding.batch_axis import BatchAxisForward
from jacobi_core.decoding.cache import CachedForward, side_by_side
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.doctor import certify, method_configs, plain_greedy
from jacobi_core.decoding.equivalence import compare_with_ar
from jacobi_core.decoding.flex_mask import block_mask
from jacobi_core.decoding.forwards import forward_for
from jacobi_core.decoding.static_forward import StaticForward, widths_for
from tests.core.loop import decode
from tests.core.tiny import FAMILIES, random_prompts, tiny_model, tiny_rules

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 10, 5, 6], *random_prompts(9, seed=3)]
CONFIGS = [config for _, config in method_configs([8], 60)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_equals_eager_equals_the_growing_cache(family, dtype):
    model = tiny_model(family, seed=1, dtype=dtype).to(DEVICE)
    for config in CONFIGS:
        made = dict(capacity=12 + config.max_new_tokens, widths=widths_for(config))
        captured, eager = StaticForward(model, **made), StaticForward(model, **made, capture=False)
        for prompt in PROMPTS:  # the graphs of one text serve the next
            expected = decode(model, CachedForward(model), prompt, config)
            for forward in (captured, eager):
                found = decode(model, forward, prompt, config)
                assert found.new_tokens.tolist() == expected.new_tokens.tolist()
                assert found.stats == expected.stats
        graphs = [step.graph for step in captured._steps.values() if step.uses > 1]
        assert graphs and None not in graphs
        assert all(step.graph is None for step in eager._steps.values())


def test_cuda_gets_the_static_forward_and_no_memory_is_taken_step_by_step():
    model = tiny_model(seed=2, initializer_range=0.02, max_position_embeddings=4096).to(DEVICE)  # repeats itself: no EOS
    config = DecodingConfig(method=Method.mr, block_size=8, max_new_tokens=1000)
    forward, held = forward_for(model, config, 1100), []
    assert type(forward) is StaticForward
    keep = forward.keep

    def kept(verdicts):
        keep(verdicts)
        held.append(torch.cuda.memory_allocated())

    forward.keep = kept
    decode(model, forward, [9] * 4, config)
    assert len(held) > 50
    assert held[-1] <= held[len(held) // 2]


def only_ties(model, make_forward):
    """Every difference from the plainest AR loop is one that bf16 explains. make_forward: config -> a forward for one text."""
    rules = tiny_rules(model, eos_ids=(10, 20))
    for config in CONFIGS:
        for prompt in PROMPTS:
            ids = torch.tensor(prompt)
            ar = plain_greedy(model, ids, max_new_tokens=config.max_new_tokens, eos_ids=rules.eos_ids)
            difference = compare_with_ar(model, ids, ar, decode(model, make_forward(config), prompt, config).new_tokens)
            assert difference is None or difference.kind == "tie", (config, prompt, difference)


def test_bf16_differences_are_ties():
    model = tiny_model("llama", seed=1).to(DEVICE).bfloat16()
    only_ties(model, lambda config: CachedForward(model))
    only_ties(model, lambda config: StaticForward(model, capacity=72, widths=widths_for(config)))
    assert certify(model, PROMPTS, method_configs([2, 17], 60), rules=tiny_rules(model)).defects == []


def test_flash_attention_on_the_batch_axis():
    pytest.importorskip("flash_attn")
    model = tiny_model("qwen3", seed=1).to(DEVICE).bfloat16()
    model.set_attn_implementation("flash_attention_2")
    assert type(forward_for(model, CONFIGS[0], 72)) is BatchAxisForward
    only_ties(model, lambda config: BatchAxisForward(model))


def test_flex_attention_takes_the_block_mask():
    model = tiny_model(seed=1, dtype=torch.float32).to(DEVICE)
    visible = side_by_side(9, 1, (4, 3)).to(DEVICE)
    prompt, fed = torch.tensor(random_prompts(2, seed=4, shortest=9, longest=9), device=DEVICE).split(1)
    positions = torch.tensor([[9, 10, 11, 12, 13, 10, 11, 12]], device=DEVICE)
    found = []
    for implementation, mask in (("sdpa", visible), ("flex_attention", block_mask(visible))):
        model.set_attn_implementation(implementation)
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=prompt, cache=cache, use_cache=True)
            found.append(model(input_ids=fed[:, :8], position_ids=positions, attention_mask=mask, cache=cache, use_cache=True).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-3)
