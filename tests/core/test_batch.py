"""A batch of ragged rows: each row's tokens and statistics are those of its run alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding.batch import BatchForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate, generate_batch
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


def test_unfilled_columns_are_taken_out_and_never_read(monkeypatch):
    """A row that accepts much beside rows that accept little: the cache stays near the longest row, and garbage in holes changes nothing."""
    model = tiny_model(seed=2, initializer_range=0.02)  # repeats itself: some rows accept whole blocks
    rules = tiny_rules(model)
    prompts = [[9] * 12, [5, 6, 7], [11, 9, 8, 7, 6], [30] * 3]
    config = DecodingConfig(method=Method.running_window, block_size=8, max_new_tokens=96)
    widths, keep = [], BatchForward.keep

    def spoiled(self, verdicts):
        keep(self, verdicts)
        widths.append(self.length / max(self._seen))
        holes = ~self._valid_BW[:, None, :, None]
        for layer in self.cache.layers:
            layer.keys.masked_fill_(holes, 1e3)
            layer.values.masked_fill_(holes, 1e3)

    monkeypatch.setattr(BatchForward, "keep", spoiled)
    together = generate_batch(model, prompts, config, rules=rules)
    monkeypatch.undo()
    for key, (prompt, row) in enumerate(zip(prompts, together, strict=True)):
        assert row.new_tokens.tolist() == generate(model, torch.tensor(prompt), config, rules=rules, prompt_id=key).new_tokens.tolist()
    assert len({row.stats.forwards for row in together}) > 1
    assert widths[-1] < 2


def test_no_rows_and_empty_rows():
    model = MODELS["qwen2"]
    assert generate_batch(model, [], DecodingConfig(max_new_tokens=4)) == []
    with pytest.raises(ValueError, match="at least one token"):
        generate_batch(model, [[5], []], DecodingConfig(max_new_tokens=4))
