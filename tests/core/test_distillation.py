"""Schedules, packing, the visibility rule and the losses, each against something written another way."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding.cache import model_mask
from jacobi_core.distillation.attention import dense_mask
from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.losses import loss_counts, loss_terms
from jacobi_core.distillation.noise_schedule import NoiseSchedule, nearest_state, target_count, target_ratios
from jacobi_core.distillation.packing import IGNORE, Kind, batch_rows, join_samples, pack_trajectory
from jacobi_core.trajectories.collect import collect
from jacobi_core.trajectories.record import Trajectory
from tests.core.tiny import FAMILIES, VOCABULARY, random_prompts, tiny_model, tiny_rules


def ratios(num_blocks=6, block_size=4, sample_id=1, **schedule):
    return target_ratios(NoiseSchedule(**schedule), num_blocks=num_blocks, block_size=block_size, sample_id=sample_id)


def test_schedules_by_hand():
    assert ratios(kind="linear", window=3) == [0, 0.5, 1, 0, 0.5, 1]
    assert ratios(kind="reverse", window=3) == [1, 0.5, 0, 1, 0.5, 0]
    assert ratios(kind="linear", window=4, endpoints="paper") == [0, 0.25, 0.5, 0.75, 0, 0.25]
    assert ratios(kind="linear", window=3, t_min=0.2, t_max=0.8) == pytest.approx([0.2, 0.5, 0.8] * 2)
    assert ratios(kind="linear", window=1, t_max=0.9) == [0.9] * 6
    assert ratios(kind="reverse", window=1) == [1.0] * 6
    draws = ratios(kind="random", window=1, num_blocks=4000)
    assert set(draws) == {0.25, 0.5, 0.75, 1.0}
    assert min(draws.count(t) for t in set(draws)) > 800
    assert draws == ratios(kind="random", window=1, num_blocks=4000)
    assert draws != ratios(kind="random", window=1, num_blocks=4000, sample_id=2)
    assert set(ratios(kind="random", window=1, num_blocks=200, t_min=0.5)) == {0.5, 0.75, 1.0}


def test_state_choice_by_hand():
    assert [target_count(t, 4, NoiseSchedule().rounding) for t in (0, 0.125, 0.3, 0.625, 1)] == [0, 1, 1, 3, 4]
    assert target_count(0.3, 4, NoiseSchedule(rounding="ceil").rounding) == 2
    assert nearest_state([4, 2, 0], 3) == 0  # a tie goes to the earlier, noisier state
    assert nearest_state([4, 3, 1, 0], 2) == 1
    assert nearest_state([4, 3, 1, 0], 0) == 3


def test_bad_schedules_are_refused_by_name():
    for settings_, match in (({"window": 0}, "window"), ({"t_min": 0.8, "t_max": 0.2}, "t_min"), ({"kind": "zigzag"}, "zigzag")):
        with pytest.raises(ValueError, match=match):
            NoiseSchedule(**settings_)


def hand_trajectory():
    """Block size 3, answer 5 6 7 | 8 9(EOS)."""
    states = [torch.tensor([[1, 1, 1], [5, 1, 2], [5, 6, 7]]), torch.tensor([[2, 2], [8, 9]])]
    return Trajectory(3, torch.tensor([30, 31]), torch.tensor([5, 6, 7, 8, 9]), "eos", 3, states)


def test_packed_row_by_hand():
    row, noise = pack_trajectory(hand_trajectory(), NoiseSchedule(kind="linear", window=2, t_min=0.6))  # targets 2 of 3, 2 of 2
    assert noise == [pytest.approx(2 / 3), 1.0]
    assert row.input_ids.tolist() == [30, 31, 5, 1, 2, 5, 6, 7, 2, 2, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 5, 6]
    assert row.kind.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 1, 1, 2, 2]
    assert row.block.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert row.labels.tolist() == [IGNORE, 5, IGNORE, IGNORE, IGNORE, 6, 7, 8, IGNORE, IGNORE, 9, IGNORE]
    # offset 0 of block 0 is converged; the answer's last token (EOS) is a target, never a counted input
    assert row.teacher.tolist() == [-1, -1, -1, 6, 7, -1, -1, -1, 10, -1, -1, -1]


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


def test_losses_equal_a_loop_over_tokens():
    model = tiny_model(seed=6)
    row, _ = pack_trajectory(trajectories(model, 1, 4, 18, seed=3)[0], NoiseSchedule(kind="reverse", window=3))
    batch = batch_rows([row], multiple_of=8)
    terms = loss_terms(model, batch, temperature=2.0)
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=dense_mask(batch), use_cache=False).logits[0].detach()
    consistency = ar = 0.0
    for i in range(len(row)):
        if row.labels[i] != IGNORE:
            ar += float(F.cross_entropy(logits[i], row.labels[i]))
        if row.teacher[i] >= 0:
            teacher = (logits[row.teacher[i]] / 2.0).softmax(-1)
            consistency += 4.0 * float((teacher * (teacher.log() - (logits[i] / 2.0).log_softmax(-1))).sum())
    assert terms.ar.item() == pytest.approx(ar)
    assert terms.consistency.item() == pytest.approx(consistency)
    assert loss_counts(batch).tolist() == [int((row.teacher >= 0).sum()), int((row.labels != IGNORE).sum())]


def test_teacher_gets_no_gradient():
    """With only the consistency loss, perturbing the teacher's path alone cannot matter: clean-token logits carry no gradient."""
    model = tiny_model(seed=6)
    row, _ = pack_trajectory(hand_trajectory(), NoiseSchedule(kind="reverse", window=1))
    logits = []

    def keep(module, args, output):
        output.logits.retain_grad()
        logits.append(output.logits)

    hook = model.register_forward_hook(keep)
    loss_terms(model, batch_rows([row])).consistency.backward()
    hook.remove()
    with_gradient = logits[0].grad[0].abs().sum(-1).nonzero().flatten()
    assert len(with_gradient) == int((row.teacher >= 0).sum())


def test_samples_in_one_row_or_in_many_rows_or_padded():
    model = tiny_model("llama", seed=6)
    rows = [pack_trajectory(t, NoiseSchedule(kind="random", window=2))[0] for t in trajectories(model, 4, 4, 18, seed=9)]
    layouts = ([rows], [[r] for r in rows], [rows[:1], rows[1:]])
    sums = []
    for layout in layouts:
        terms = loss_terms(model, batch_rows([join_samples(r) for r in layout], multiple_of=32))
        sums.append((float(terms.consistency), float(terms.ar), int(terms.agreement)))
    assert sums[1] == pytest.approx(sums[0])
    assert sums[2] == pytest.approx(sums[0])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 500), n=st.sampled_from([2, 3, 8]), kind=st.sampled_from(["linear", "random", "reverse"]))
def test_nothing_past_eos_and_nothing_unseen_matters(seed, n, kind):
    """Whatever follows an answer's EOS in its row leaves its losses alone, and the last EOS is never an input of a loss."""
    model = tiny_model(seed=6)
    trajectory = trajectories(model, 1, n, 20, seed=seed)[0]
    row, _ = pack_trajectory(trajectory, NoiseSchedule(kind=kind, window=2))
    noise = row.__class__(**{**vars(row), "input_ids": torch.randint(5, VOCABULARY, (len(row),))})
    alone, followed = batch_rows([row]), batch_rows([join_samples([row, noise])])
    followed.labels[:, len(row) :], followed.teacher[:, len(row) :] = IGNORE, -1
    a, b = loss_terms(model, alone), loss_terms(model, followed)
    assert float(a.consistency) == pytest.approx(float(b.consistency))
    assert float(a.ar) == pytest.approx(float(b.ar))
    last = int(row.position_ids.max())
    assert (row.labels[row.position_ids == last] == IGNORE).all()
    assert (row.teacher[row.position_ids == last] == -1).all()
    assert not math.isnan(float(a.consistency))
