"""A batch of ragged rows: each row's tokens and statistics are those of its run alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding.batch import BatchForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import NOT_FINITE, Row, generate, generate_batch, step
from tests.core.tiny import FAMILIES, random_prompts, tiny_model, tiny_rules

MODELS = {family: tiny_model(family, seed=1) for family in FAMILIES}


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(list(MODELS)),
    rows=st.integers(1, 5),
    method=st.sampled_from(list(Method)),
    n=st.sampled_from([1, 2, 3, 8, 17]),
    cap=st.integers(1, 40),
    max_blocks=st.sampled_from([1, 2, 3]),
    drafts=st.sampled_from([1, 1, 3]),
    ngram=st.booleans(),
    temperature=st.sampled_from([0.0, 0.0, 0.7]),
    seed=st.integers(0, 1000),
)
def test_each_row_is_its_run_alone(family, rows, method, n, cap, max_blocks, drafts, ngram, temperature, seed):
    model = MODELS[family]
    rules = tiny_rules(model, eos_ids=(10, 20, 30))
    prompts = random_prompts(rows, seed=seed)
    if method is Method.ar:
        n, ngram = 1, False
    if method in (Method.ar, Method.jacobi):
        drafts = 1
    knobs = dict(max_blocks=max_blocks, drafts=drafts, ngram=ngram, temperature=temperature)
    config = DecodingConfig(method=method, block_size=n, max_new_tokens=cap, seed=seed, **knobs)
    together = generate_batch(model, prompts, config, rules=rules, prompt_ids=range(5, 5 + rows))
    for key, (prompt, row) in enumerate(zip(prompts, together, strict=True), start=5):
        alone = generate(model, torch.tensor(prompt), config, rules=rules, prompt_id=key)
        assert row.new_tokens.tolist() == alone.new_tokens.tolist()
        assert row.stats == alone.stats


def test_columns_beyond_a_row_are_never_read_and_rows_have_no_holes(monkeypatch):
    """A row that accepts much beside rows that accept little: garbage behind what a row holds changes nothing, and no row's place grows by more
    than what it accepted."""
    model = tiny_model(seed=2, initializer_range=0.02)  # repeats itself: some rows accept whole blocks
    rules = tiny_rules(model)
    prompts = [[9] * 12, [5, 6, 7], [11, 9, 8, 7, 6], [30] * 3]
    config = DecodingConfig(method=Method.running_window, block_size=8, max_new_tokens=96)
    columns, keep = [], BatchForward.keep

    def spoiled(self, verdicts):
        keep(self, verdicts)
        columns.append(self.reserved[1])
        for layer in self._layers:
            for buffer in layer._buffers:
                for slot, held in enumerate(self._held):
                    buffer[slot, :, held:] = 1e3

    monkeypatch.setattr(BatchForward, "keep", spoiled)
    together = generate_batch(model, prompts, config, rules=rules)
    monkeypatch.undo()
    for key, (prompt, row) in enumerate(zip(prompts, together, strict=True)):
        assert row.new_tokens.tolist() == generate(model, torch.tensor(prompt), config, rules=rules, prompt_id=key).new_tokens.tolist()
    assert len({row.stats.forwards for row in together}) > 1
    assert max(columns) <= 1.5 * (12 + 96 + 8) + 16
    assert columns[-1] == 0  # nobody is left: the memory is given back


@settings(max_examples=40, deadline=None)
@given(data=st.data(), family=st.sampled_from(list(MODELS)))
def test_rows_that_join_and_leave_are_their_runs_alone(data, family):
    """Any order of joins, forwards and departures; who stays says what it says alone."""
    model = MODELS[family]
    rules, forward, running, started = tiny_rules(model, eos_ids=(10, 20, 30)), BatchForward(model), [], []
    for _ in range(data.draw(st.integers(1, 12))):
        if running and data.draw(st.booleans()):
            gone = data.draw(st.sets(st.integers(0, len(running) - 1), max_size=2))
            forward.leave(gone)
            running = [row for i, row in enumerate(running) if i not in gone]
        for _ in range(data.draw(st.integers(0, 2))):
            seed = data.draw(st.integers(0, 50))
            config = DecodingConfig(
                method=data.draw(st.sampled_from([Method.running_window, Method.mr])),
                block_size=data.draw(st.sampled_from([1, 3, 8])),
                max_new_tokens=data.draw(st.integers(1, 30)),
                ngram=data.draw(st.booleans()),
                seed=seed,
            )
            prompt = torch.tensor(random_prompts(1, seed=seed)[0])
            running.append(Row.make(model, prompt, config, rules))
            started.append((running[-1], prompt, config))
            forward.join(1)
        if running:
            running = [row for row, verdict in zip(running, step(forward, running), strict=True) if verdict is not None]
    while running:
        running = [row for row, verdict in zip(running, step(forward, running), strict=True) if verdict is not None]
    for row, prompt, config in started:
        alone = generate(model, prompt, config, rules=rules)
        said = row.generation.new_tokens.tolist()
        assert said == alone.new_tokens.tolist()[: len(said)]
        if row.text.stats.stop_reason:
            assert row.generation.stats == alone.stats and len(said) == alone.stats.tokens


def test_a_row_whose_logits_break_leaves_and_nothing_of_it_reaches_who_comes_next(monkeypatch):
    model = MODELS["qwen3"]
    rules, config = tiny_rules(model), DecodingConfig(method=Method.mr, block_size=4, max_new_tokens=12)
    prompts = [[5, 6, 7] * 10, [8, 9], [11, 12] * 20]  # the second takes the first one's slot and fills little of it
    rows = [Row.make(model, torch.tensor(p), config, rules, guarded=True) for p in prompts]
    forward = BatchForward(model, 2)
    step(forward, rows[:2])
    with torch.inference_mode():
        for layer in forward._layers:
            for buffer in layer._buffers:
                buffer[0, :, : forward._held[0]] = torch.nan
    assert [verdict is None for verdict in step(forward, rows[:2])] == [True, False]
    assert rows[0].text.stats.stop_reason == NOT_FINITE
    forward.join(1)
    running = [rows[1], rows[2]]
    while running:
        running = [row for row, verdict in zip(running, step(forward, running), strict=True) if verdict is not None]
    for row, prompt in zip(rows[1:], prompts[1:], strict=True):
        assert row.generation.new_tokens.tolist() == generate(model, torch.tensor(prompt), config, rules=rules).new_tokens.tolist()


def test_no_rows_and_empty_rows():
    model = MODELS["qwen2"]
    assert generate_batch(model, [], DecodingConfig(max_new_tokens=4)) == []
    with pytest.raises(ValueError, match="at least one token"):
        generate_batch(model, [[5], []], DecodingConfig(max_new_tokens=4))
