"""The visibility rule, against something written another way. Rows: test_packing.py; losses: test_losses.py."""

from __future__ import annotations

import pytest
import torch

from jacobi_core.decoding.cache import model_mask
from jacobi_core.distillation.attention import dense_mask
from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import Kind, batch_rows, join_samples, pack_trajectory
from jacobi_core.trajectories.collect import collect
from tests.core.tiny import FAMILIES, random_prompts, tiny_model, tiny_rules


def brute_force_sees(row, q, k, variant):
    """The rule as the algorithm page words it, one pair at a time."""
    name = {Kind.PROMPT: "prompt", Kind.NOISY: "noisy", Kind.CLEAN: "clean"}
    kind_q, kind_k = name[Kind(int(row.kind[q]))], name[Kind(int(row.kind[k]))]
    before = int(row.position_ids[k]) <= int(row.position_ids[q])
    if int(row.sample[q]) != int(row.sample[k]):
        return False
    if kind_k == "prompt":
        return before
    if kind_q == "clean" and kind_k == "clean":
        return before
    if kind_q == "noisy" and variant == "nc":
        if kind_k == "clean":
            return int(row.window[k]) < int(row.window[q])
        return int(row.window[k]) == int(row.window[q]) and before
    if kind_q == "noisy" and variant == "nc_ic":
        if kind_k == "clean":
            return int(row.block[k]) < int(row.block[q])
        return int(row.block[k]) == int(row.block[q]) and before
    return False


def trajectories(model, count, n, cap, seed):
    rules = tiny_rules(model, eos_ids=(10, 20))
    return collect(model, random_prompts(count, seed=seed), list(range(count)), block_size=n, max_new_tokens=cap, seed=seed, rules=rules).trajectories


@pytest.mark.parametrize("variant", ["nc", "nc_ic"])
@pytest.mark.parametrize(("n", "window"), [(3, 2), (4, 1), (1, 3)])
def test_mask_is_the_rule_pair_by_pair(variant, n, window):
    schedule = NoiseSchedule(kind="linear", window=window)
    samples = [pack_trajectory(t, schedule)[0] for t in trajectories(tiny_model(), 3, n, 8, seed=2)]
    row = join_samples(samples)
    batch = batch_rows([row, samples[0]], multiple_of=8)
    mask = dense_mask(batch, MaskVariant(variant))
    for q in range(len(row)):
        assert [bool(v) for v in mask[0, 0, q, : len(row)]] == [brute_force_sees(row, q, k, variant) for k in range(len(row))]
    real = batch.sample >= 0
    assert not (mask[:, 0] & (real.unsqueeze(2) != real.unsqueeze(1))).any()  # padding and text never meet
    assert mask.any(-1).all()  # no query without a key


@pytest.mark.parametrize("variant", ["nc", "nc_ic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_are_those_of_plain_causal_forwards(family, variant):
    """The two invariants of algorithm section 4, with two samples in a row and padding behind them."""
    model = tiny_model(family, seed=4)
    schedule = NoiseSchedule(kind="linear", window=2, t_min=0.3)
    found = trajectories(model, 2, 4, 19, seed=7)
    samples = [pack_trajectory(t, schedule)[0] for t in found]
    batch = batch_rows([join_samples(samples)], multiple_of=16)
    mask = model_mask(model, dense_mask(batch, MaskVariant(variant)))
    with torch.inference_mode():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask, use_cache=False).logits[0]
        at = 0
        for trajectory, row in zip(found, samples, strict=True):
            here = logits[at : at + len(row)]
            at += len(row)
            plain = model(input_ids=torch.cat([trajectory.prompt_ids, trajectory.answer_ids]).unsqueeze(0), use_cache=False).logits[0]
            torch.testing.assert_close(here[row.kind != Kind.NOISY], plain)
            for i in range(len(trajectory.states)):
                mine = (row.kind == Kind.NOISY) & (row.block == i)
                first = i // schedule.window * schedule.window if variant == "nc" else i
                between = (row.kind == Kind.NOISY) & (row.block >= first) & (row.block < i)
                context = torch.cat([trajectory.prompt_ids, trajectory.answer_ids[: first * 4], row.input_ids[between], row.input_ids[mine]])
                causal = model(input_ids=context.unsqueeze(0), use_cache=False).logits[0]
                torch.testing.assert_close(here[mine], causal[-int(mine.sum()) :])
