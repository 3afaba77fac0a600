"""Batched, block-parallel collection gives the states of plain block-by-block Jacobi decoding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding.drafts import ContextDrafts
from jacobi_core.trajectories.collect import collect
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
)
def test_batched_collection_equals_the_definition(family, rows, n, cap, seed):
    model = MODELS[family]
    rules = tiny_rules(model, eos_ids=(10, 20, 30))
    prompts = random_prompts(rows, seed=seed)
    ids = [seed + 17 * i for i in range(rows)]
    collected = collect(model, prompts, ids, block_size=n, max_new_tokens=cap, seed=seed, rules=rules)
    assert collected.disagreements == 0
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
