"""The core on a CUDA device: what the CPU tests prove, once more where the kernels are others. Needs no Ray. Never run so far."""

from __future__ import annotations

import warnings

import pytest
import torch

from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.equivalence import compare_with_ar
from jacobi_core.decoding.generate import generate
from jacobi_core.distillation.attention_variant import Backend
from jacobi_core.distillation.losses import PackedLoss
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import batch_rows, pack_trajectory
from jacobi_core.trajectories.collect import collect
from tests.core.tiny import FAMILIES, random_prompts, tiny_model, tiny_rules

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("family", FAMILIES)
def test_parallel_equals_ar_in_fp64(family):
    model = tiny_model(family, seed=1).cuda()
    rules = tiny_rules(model, eos_ids=(10, 20))
    for number, prompt in enumerate(random_prompts(20, seed=3)):
        ids = torch.tensor(prompt)
        ar = generate(model, ids, DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=40), rules=rules)
        for method in Method:
            if method is Method.ar:
                continue
            config = DecodingConfig(method=method, block_size=8, max_new_tokens=40)
            assert torch.equal(generate(model, ids, config, rules=rules, prompt_id=number).new_tokens, ar.new_tokens)


def test_bf16_differences_are_ties():
    model = tiny_model("llama", seed=1).cuda().bfloat16()
    rules = tiny_rules(model)
    for prompt in random_prompts(20, seed=3):
        ids = torch.tensor(prompt)
        ar = generate(model, ids, DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=40), rules=rules).new_tokens
        parallel = generate(model, ids, DecodingConfig(block_size=8, max_new_tokens=40), rules=rules).new_tokens
        difference = compare_with_ar(model, ids, ar, parallel)
        assert difference is None or difference.kind == "tie"


def test_trajectories_and_losses_equal_the_cpu():
    results = []
    for device in ("cpu", "cuda"):
        model = tiny_model(seed=6).to(device)
        rules = tiny_rules(model, eos_ids=(10, 20))
        found = collect(model, random_prompts(3, seed=9), [1, 2, 3], block_size=4, max_new_tokens=18, seed=0, rules=rules).trajectories
        batch = batch_rows([pack_trajectory(t, NoiseSchedule(window=2))[0] for t in found]).to(torch.device(device))
        terms = PackedLoss(model, window=2, backend=Backend.dense)(batch)
        terms.loss.backward()
        numbers = [terms.loss, *terms.consistency, terms.ar, *terms.noisy_tokens, terms.agreement, *(p.grad.norm() for p in model.parameters())]
        results.append(([[s.tolist() for s in t.states] for t in found], [n.item() for n in numbers]))
    assert results[0][0] == results[1][0]
    assert results[1][1] == pytest.approx(results[0][1])


def test_the_loss_waits_for_the_device_once(monkeypatch):
    """Every other wait would let the device run dry between chunks."""
    model = tiny_model(seed=6).cuda()
    found = collect(model, random_prompts(3, seed=9), [1, 2, 3], block_size=4, max_new_tokens=18, seed=0, rules=tiny_rules(model)).trajectories
    batch = batch_rows([pack_trajectory(t, NoiseSchedule(window=2))[0] for t in found]).to(torch.device("cuda"))
    loss = PackedLoss(model, window=2, backend=Backend.dense)
    loss(batch).loss.backward()
    inputs = loss._attention(batch)  # the mask's own business
    monkeypatch.setattr(loss, "_attention", lambda batch: inputs)
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        loss(batch).loss.backward()
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in waits if "synchroniz" in str(w.message)]) <= 1
