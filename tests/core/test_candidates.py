"""Drafts beside the refreshed one, and the block scheduler: by hand, and as the property that no draft ever changes the text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding import text as text_module
from jacobi_core.decoding.blocks import Horizon
from jacobi_core.decoding.cache import side_by_side
from jacobi_core.decoding.candidates import NgramIndex, RejectedPool
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.text import NGRAM, RECYCLED, Text
from jacobi_core.decoding.tokens import TokenRules
from tests.core.tiny import VOCABULARY, random_prompts, tiny_model, tiny_rules

MODEL = tiny_model("llama", seed=1)
NO_EOS = TokenRules(eos_ids=frozenset(), vocabulary_size=VOCABULARY, special_ids=frozenset())


def test_pool_continues_the_newest_draft_first():
    pool = RejectedPool(2)
    for draft in ([7, 1, 2], [5, 7, 3, 7, 4], [9], [8, 8]):  # the first falls out; a single token has no continuation
        pool.add(draft)
    assert list(pool.continuations(7)) == [[3, 7, 4], [4]]
    assert list(pool.continuations(8)) == [[8]]
    assert list(pool.continuations(4)) == []


def test_ngram_index_prefers_long_then_late_matches():
    index = NgramIndex([1, 2, 3, 10, 9, 2, 3, 11, 1, 2, 3])
    assert list(index.continuations(2)) == [[10, 9], [11, 1], [10, 9]]  # 1 2 3, then 2 3 (latest first)
    index.extend([10])
    assert next(index.continuations(3)) == [9, 2, 3]
    assert list(NgramIndex([4, 5]).continuations(3)) == []


def test_horizon_by_hand():
    def horizon(method, **knobs):
        return Horizon(DecodingConfig(method=method, block_size=4, **knobs))

    assert [horizon(Method.jacobi).end(done) for done in (0, 3, 4, 9)] == [4, 4, 8, 12]
    assert [horizon(Method.running_window).end(done) for done in (0, 3, 4)] == [4, 7, 8]
    multi = horizon(Method.multi_block, max_blocks=2, spawn_ratio=0.75)
    assert multi.end(0) == 4
    multi.observe(2, 2)
    assert multi.end(2) == 4  # 2 of 4 are not enough
    multi.observe(3, 3)
    assert (multi.end(3), multi.newest) == (8, 4)
    multi.observe(3, 4)
    assert multi.end(3) == 8  # two blocks are in flight already
    multi.observe(5, 3)
    assert multi.end(5) == 12  # the first block is full and gone
    assert multi.end(12) == 16


def test_chains_see_the_text_and_themselves_only():
    mask = side_by_side(2, 1, (2, 1))[0, 0].int().tolist()
    assert mask == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 1]]


def test_candidates_are_distinct_and_within_the_budget(monkeypatch):
    seen = []
    propose = Text.propose

    def spy(self):
        chains = propose(self)
        seen.append(chains)
        return chains

    monkeypatch.setattr(Text, "propose", spy)
    config = DecodingConfig(method=Method.mr, block_size=8, max_new_tokens=60, verification_size=3, ngram=True)
    generate(MODEL, torch.tensor([9, 8, 7, 9, 8, 7, 9, 8]), config, rules=NO_EOS)
    assert max(len(chains) for chains in seen) == 3
    for chains in seen:
        tokens = [tuple(c.tokens) for c in chains]
        assert len(set(tokens)) == len(tokens)
        assert all(len(t) <= len(tokens[0]) for t in tokens[1:])


class _Oracle:
    """A source of candidates that knows the answer, or its opposite."""

    def __init__(self, answer, wrong):
        self.answer, self.wrong = answer, wrong

    def continuations_at(self, done, length):
        tokens = self.answer[done : done + length]
        return [[(t + 1) % VOCABULARY for t in tokens] if self.wrong else tokens]


@pytest.mark.parametrize("method", [Method.recycling, Method.mr])
@pytest.mark.parametrize("wrong", [False, True])
def test_oracle_and_adversarial_candidates_change_only_the_number_of_forwards(monkeypatch, method, wrong):
    prompt = torch.tensor(random_prompts(1, seed=5)[0])
    answer = generate(MODEL, prompt, DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=40), rules=NO_EOS).new_tokens.tolist()
    config = DecodingConfig(method=method, block_size=8, max_new_tokens=40, spawn_ratio=0.5)
    plain = generate(MODEL, prompt, config, rules=NO_EOS)
    oracle = _Oracle(answer, wrong)

    def candidates(self, length):
        for tokens in oracle.continuations_at(len(self.answer), length):
            if tokens:
                yield text_module.Chain(tokens, RECYCLED)

    monkeypatch.setattr(Text, "_candidates", candidates)
    helped = generate(MODEL, prompt, config, rules=NO_EOS)
    assert helped.new_tokens.tolist() == plain.new_tokens.tolist() == answer
    if wrong:
        assert RECYCLED not in helped.stats.accepted_from or helped.stats.forwards <= plain.stats.forwards
    else:
        assert helped.stats.forwards <= 6 < plain.stats.forwards
        assert helped.stats.accepted_from[RECYCLED] > 20


@pytest.mark.parametrize("offset", range(1, 8))
def test_eos_inside_a_candidate_ends_the_text_there(monkeypatch, offset):
    prompt = torch.tensor(random_prompts(1, seed=6)[0])
    answer = generate(MODEL, prompt, DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=12), rules=NO_EOS).new_tokens.tolist()
    rules = TokenRules(eos_ids=frozenset({answer[offset]}), vocabulary_size=VOCABULARY, special_ids=frozenset())
    monkeypatch.setattr(Text, "_candidates", lambda self, length: iter([text_module.Chain(answer[len(self.answer) :][:length], RECYCLED)]))
    config = DecodingConfig(method=Method.recycling, block_size=8, max_new_tokens=12)
    found = generate(MODEL, prompt, config, rules=rules)
    assert found.new_tokens.tolist() == answer[: answer.index(answer[offset]) + 1]
    assert found.stats.stop_reason == "eos"


def test_copying_helps_an_untrained_model_on_a_repetitive_text():
    model = tiny_model(seed=2, initializer_range=0.02)
    prompt = torch.tensor([9, 8, 7] * 4)
    plain = generate(model, prompt, DecodingConfig(method=Method.running_window, block_size=8, max_new_tokens=32), rules=NO_EOS)
    copied = generate(model, prompt, DecodingConfig(method=Method.running_window, block_size=8, max_new_tokens=32, ngram=True), rules=NO_EOS)
    assert copied.new_tokens.tolist() == plain.new_tokens.tolist()
    assert copied.stats.accepted_from[NGRAM] > 0
    assert copied.stats.forwards <= plain.stats.forwards


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 500), n=st.sampled_from([2, 8, 17]), method=st.sampled_from([Method.recycling, Method.mr]))
def test_the_cache_holds_exactly_the_committed_text(seed, n, method):
    """After moves and rollbacks, what the cache gives for the next token is what a fresh forward over the whole text gives."""
    from jacobi_core.decoding.cache import CachedForward

    prompt = random_prompts(1, seed=seed)[0]
    with torch.inference_mode():
        forward = CachedForward(MODEL)
        text = Text(
            torch.tensor(prompt), DecodingConfig(method=method, block_size=n, max_new_tokens=24, ngram=True), tiny_rules(MODEL), prompt_id=seed
        )
        while True:
            chains = text.propose()
            chosen = forward.logits_of([(text.uncached, [c.tokens for c in chains])])[0].argmax(-1).tolist()
            verdict = text.receive(chains, text.read(chains, chosen))
            if verdict is None:
                return
            forward.keep([(verdict.winner, verdict.accepted)])
            whole = prompt + text.answer
            assert forward.length == len(whole) - 1
            cached = forward(torch.tensor([whole[-1:]]))[0, -1]
            forward.rollback(len(whole) - 1)
            fresh = MODEL(input_ids=torch.tensor([whole]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(cached, fresh)
