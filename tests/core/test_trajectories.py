"""Batched, block-parallel collection gives the states of plain block-by-block Jacobi decoding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding.drafts import ContextDrafts
from jacobi_core.decoding.greedy_batch import GreedyAnswer, greedy_batch
from jacobi_core.distillation.noise_schedule import NoiseSchedule, nearest_state, target_count, target_ratios
from jacobi_core.trajectories import collect as collect_module
from jacobi_core.trajectories.collect import collect
from jacobi_core.trajectories.disagreement import OnDisagreement
from jacobi_core.trajectories.record import Trajectory, converged_prefix
from tests.core.tiny import random_prompts, tiny_model, tiny_rules

MODELS = {family: tiny_model(family, seed=1) for family in ("qwen2", "llama")}


def states_by_definition(model, prompt, answer, n, *, prompt_id, seed, rules):
    """Jacobi iteration of every block as the paper writes it: whole block, no cache, until the fixed point."""
    blocks = []
    for start in range(0, len(answer), n):
        fixed = torch.tensor(answer[start : start + n])
        context = torch.tensor(prompt + answer[:start])
        drafts = ContextDrafts(context, prompt_id=prompt_id, seed=seed, rules=rules, capacity=1)
        state = drafts.draw(start, len(fixed))
        states = [state]
        while not torch.equal(state, fixed):
            logits = model(input_ids=torch.cat([context, state]).unsqueeze(0), use_cache=False).logits[0]
            state = logits[len(context) - 1 : -1].argmax(-1)
            states.append(state)
        blocks.append(torch.stack(states))
    return blocks


@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from(list(MODELS)),
    rows=st.integers(1, 5),
    n=st.sampled_from([1, 2, 3, 8, 17]),
    cap=st.integers(1, 30),
    seed=st.integers(0, 999),
    batch_size=st.sampled_from([1, 2, 3, 64]),
    tokens=st.sampled_from([1, 20, 1024]),
)
def test_batched_collection_equals_the_definition(family, rows, n, cap, seed, batch_size, tokens):
    model = MODELS[family]
    rules = tiny_rules(model, eos_ids=(10, 20, 30))
    prompts = random_prompts(rows, seed=seed)
    ids = [seed + 17 * i for i in range(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect_module, "CPU_TOKENS", tokens)  # one answer per forward, a few, all
        collected = collect(model, prompts, ids, block_size=n, max_new_tokens=cap, seed=seed, rules=rules, batch_size=batch_size)
    assert (collected.disagreements, collected.dropped) == (0, {})
    for trajectory, prompt, prompt_id in zip(collected.trajectories, prompts, ids, strict=True):
        trajectory.validate()
        assert trajectory.id == prompt_id
        expected = states_by_definition(model, prompt, trajectory.answer_ids.tolist(), n, prompt_id=prompt_id, seed=seed, rules=rules)
        assert [s.tolist() for s in trajectory.states] == [s.tolist() for s in expected]


def test_alone_or_together_or_in_another_order():
    model = MODELS["qwen2"]
    rules = tiny_rules(model, eos_ids=(10, 20, 30))
    prompts = random_prompts(6, seed=5)
    ids = list(range(100, 106))
    settings_ = dict(block_size=4, max_new_tokens=20, seed=0, rules=rules)
    together = collect(model, prompts, ids, **settings_).trajectories
    backwards = collect(model, prompts[::-1], ids[::-1], **settings_).trajectories[::-1]
    alone = [collect(model, [p], [i], **settings_).trajectories[0] for p, i in zip(prompts, ids, strict=True)]
    for others in (backwards, alone):
        for a, b in zip(together, others, strict=True):
            assert a.answer_ids.tolist() == b.answer_ids.tolist()
            assert [s.tolist() for s in a.states] == [s.tolist() for s in b.states]


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(list(MODELS)),
    rows=st.integers(0, 14),
    slots=st.integers(1, 9),
    cap=st.integers(1, 25),
    seed=st.integers(0, 999),
    longest=st.sampled_from([2, 12, 60]),
)
def test_refilled_slots_equal_each_prompt_alone(family, rows, slots, cap, seed, longest):
    model = MODELS[family]
    rules = tiny_rules(model, eos_ids=(10, 20, 30, 40))
    prompts = random_prompts(rows, seed=seed, longest=longest)
    found = greedy_batch(model, prompts, slots=slots, max_new_tokens=cap, rules=rules)
    assert len(found) == rows
    for prompt, answer in zip(prompts, found, strict=True):
        text = list(prompt)
        while len(text) - len(prompt) < cap and (len(text) == len(prompt) or text[-1] not in rules.eos_ids):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        assert answer.tokens.tolist() == text[len(prompt) :]
        assert answer.stop_reason == ("eos" if text[-1] in rules.eos_ids else "length")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_attention_implementation_gives_the_same(implementation):
    model = tiny_model(seed=1, attn_implementation=implementation)
    rules = tiny_rules(model, eos_ids=(10, 20, 30))
    prompts, settings_ = random_prompts(7, seed=2), dict(block_size=4, max_new_tokens=17, seed=0, rules=rules)
    assert model.config._attn_implementation == implementation
    expected = collect(MODELS["qwen2"], prompts, list(range(7)), **settings_)
    found = collect(model, prompts, list(range(7)), **settings_, batch_size=3)
    assert [[s.tolist() for s in t.states] for t in found.trajectories] == [[s.tolist() for s in t.states] for t in expected.trajectories]


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["linear", "random", "reverse"]),
    window=st.integers(1, 4),
    rounding=st.sampled_from(["nearest", "ceil"]),
    t_max=st.sampled_from([0.0, 0.4, 1.0]),
    n=st.sampled_from([1, 3, 8]),
    seed=st.integers(0, 99),
)
def test_a_schedule_keeps_the_state_it_would_choose(kind, window, rounding, t_max, n, seed):
    model = MODELS["qwen2"]
    schedule = NoiseSchedule(kind=kind, window=window, rounding=rounding, t_max=t_max)
    settings_ = dict(block_size=n, max_new_tokens=22, seed=seed, rules=tiny_rules(model, eos_ids=(10, 20, 30)))
    prompts, ids = random_prompts(4, seed=seed), [seed, seed + 1, seed + 2, seed + 3]
    whole = collect(model, prompts, ids, **settings_).trajectories
    for all_, few in zip(whole, collect(model, prompts, ids, **settings_, schedule=schedule).trajectories, strict=True):
        few.validate()
        ratios = target_ratios(schedule, num_blocks=len(all_.states), block_size=n, sample_id=all_.id)
        for i, (states, kept) in enumerate(zip(all_.states, few.states, strict=True)):
            fixed = all_.fixed_point(i)
            unconverged = (len(fixed) - converged_prefix(states, fixed)).tolist()
            chosen = nearest_state(unconverged, target_count(ratios[i], len(fixed), schedule.rounding))
            assert kept.tolist() == ([states[chosen].tolist(), fixed.tolist()] if unconverged[chosen] else [fixed.tolist()])


def test_answers_the_model_does_not_give_are_counted_and_cut_or_kept(monkeypatch):
    model = MODELS["qwen2"]
    rules = tiny_rules(model, eos_ids=(10, 20, 30))
    prompts, ids = random_prompts(5, seed=8), [1, 2, 3, 4, 5]
    settings_ = dict(block_size=4, max_new_tokens=12, seed=0, rules=rules)
    good = collect(model, prompts, ids, **settings_).trajectories
    spoilt = {2: 0, 4: 6}  # prompt id -> answer token that is another one

    def foreign(*args, **kwargs):
        answers = [GreedyAnswer(t.answer_ids.clone(), t.stop_reason) for t in good]
        for prompt_id, at in spoilt.items():
            answers[prompt_id - 1].tokens[at] = (answers[prompt_id - 1].tokens[at] + 1) % 60
        return answers

    assert all(len(good[prompt_id - 1].answer_ids) > at + 1 for prompt_id, at in spoilt.items())
    monkeypatch.setattr(collect_module, "greedy_batch", foreign)
    kept = collect(model, prompts, ids, **settings_)
    assert kept.disagreements >= 2 and not kept.dropped and len(kept.trajectories) == 5
    for trajectory in kept.trajectories:
        trajectory.validate()
    cut = collect(model, prompts, ids, **settings_, on_disagreement=OnDisagreement.cut)
    assert (cut.disagreements, cut.dropped) == (kept.disagreements, {2: "empty"})
    by_id = {t.id: t for t in cut.trajectories}
    assert sorted(by_id) == [1, 3, 4, 5]
    assert by_id[4].answer_ids.tolist() == good[3].answer_ids[:6].tolist() and by_id[4].stop_reason == "cut"
    by_id[4].validate()
    for i in (1, 3, 5):
        assert [s.tolist() for s in by_id[i].states] == [s.tolist() for s in good[i - 1].states]


def test_broken_invariants_are_named():
    answer = torch.tensor([5, 6, 7])
    good = Trajectory(1, torch.tensor([9]), answer, "eos", 2, [torch.tensor([[1, 1], [5, 6]]), torch.tensor([[7]])])
    good.validate()
    for states, match in (
        ([torch.tensor([[1, 1], [5, 6]])], "1 blocks"),
        ([torch.tensor([[1, 1], [5, 1]]), torch.tensor([[7]])], "block 0.*fixed point"),
        ([torch.tensor([[1, 1], [1, 2], [5, 6]]), torch.tensor([[7]])], "block 0.*no further"),
    ):
        with pytest.raises(ValueError, match=match):
            Trajectory(1, torch.tensor([9]), answer, "eos", 2, states).validate()
    assert converged_prefix(torch.tensor([[5, 1, 7], [5, 6, 7]]), answer).tolist() == [1, 3]
