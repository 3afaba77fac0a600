"""Drafts beside the refreshed one, and the block scheduler: by hand, and as the property that no draft ever changes the text."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding import text as text_module
from jacobi_core.decoding.blocks import Horizon
from jacobi_core.decoding.cache import CachedForward, side_by_side
from jacobi_core.decoding.candidates import LONGEST, PLACES, SHORTEST, NgramIndex, RejectedPool
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.drafts import ContextDrafts
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


few_tokens = st.lists(st.integers(0, 3), max_size=14)


@given(size=st.integers(0, 3), drafts=st.lists(few_tokens, max_size=6), last=st.integers(0, 3))
def test_pool_holds_what_followed_in_its_latest_drafts(size, drafts, last):
    pool = RejectedPool(size)
    for draft in drafts:
        pool.add(draft)
    kept = [d for d in drafts if len(d) > 1][max(0, sum(len(d) > 1 for d in drafts) - size) :]
    assert list(pool.continuations(last)) == [d[i + 1 :] for d in reversed(kept) for i in [i for i in range(len(d) - 1) if d[i] == last][:PLACES]]


@given(start=few_tokens, more=few_tokens, length=st.integers(1, 5))
def test_ngram_index_finds_what_a_scan_of_the_text_finds(start, more, length):
    index, text = NgramIndex(start), start + more
    index.extend(more)
    expected = []
    for n in range(LONGEST, SHORTEST - 1, -1):
        places = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        expected += [text[end : end + length] for end in reversed(places[-PLACES:])]
    assert list(index.continuations(length)) == expected


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=14),
    order=st.integers(1, 3),
    seed=st.integers(0, 99),
    method=st.sampled_from([Method.running_window, Method.recycling, Method.multi_block, Method.mr]),
    n=st.sampled_from([1, 2, 3, 8, 17]),
    knobs=st.fixed_dictionaries({"verification_size": st.integers(1, 6), "pool_size": st.sampled_from([0, 1, 4]), "ngram": st.booleans()}),
    cap=st.integers(1, 40),
)
def test_proposals_are_distinct_bounded_and_harmless(prompt, order, seed, method, n, knobs, cap):
    """A whole text, without a model: the next token is a fixed function of the last `order` ones, over 4 tokens, so pools repeat (L5)."""

    def next_token(text):
        return random.Random(f"{seed}{text[-order:]}").randrange(4)

    config = DecodingConfig(method=method, block_size=n, max_new_tokens=cap, **knobs)
    text = Text(torch.tensor(prompt), config, TokenRules(frozenset(), 4, frozenset()), prompt_id=seed)
    verdict = True
    while verdict:
        chains = text.propose()
        tokens = [tuple(chain.tokens) for chain in chains]
        assert len(set(tokens)) == len(tokens) <= (config.verification_size if config.recycles or config.ngram else 1)
        assert all(1 <= len(t) <= len(tokens[0]) for t in tokens[1:])
        assert len(text.answer) + len(tokens[0]) + 1 <= cap
        positions, prefixes = text.places(chains, with_prefixes=True)
        assert [len(p) - len(prompt) for p in prefixes] == positions
        done = len(text.answer)
        verdict = text.receive(chains, text.read(chains, [next_token(p) for p in prefixes]))
        assert verdict is None or len(text.answer) - done == verdict.accepted + 1
    expected = list(prompt)
    for _ in range(cap):
        expected.append(next_token(expected))
    assert text.answer == expected[len(prompt) :]


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("method", "max_blocks"), [("jacobi", 1), ("running_window", 1), ("recycling", 1), *itertools.product(("multi_block", "mr"), (1, 2, 3))]
)
def test_what_the_main_draft_says_changes_only_the_number_of_forwards(monkeypatch, method, max_blocks, temperature):
    """Random, always wrong, always right: right drafts need ceil(tokens / n) forwards, hopeless ones a forward per token (users' report L3)."""
    propose, shuffled = Text.propose, random.Random(1)
    for key, (prompt, n, eos) in enumerate(itertools.product(random_prompts(1, seed=5), (1, 3, 8), ((), (10, 20)))):
        rules = TokenRules(eos_ids=frozenset(eos), vocabulary_size=VOCABULARY, special_ids=frozenset())
        shared = dict(max_new_tokens=29, temperature=temperature)
        ar = DecodingConfig(method=Method.ar, block_size=1, **shared)
        answer = generate(MODEL, torch.tensor(prompt), ar, rules=rules, prompt_id=key).new_tokens.tolist()

        def right(i, answer=answer):
            return answer[i] if i < len(answer) else 0

        def hopeless(self, right=right):
            width = len(propose(self)[0].tokens)
            return [text_module.Chain([(right(len(self.answer) + i) + 1) % VOCABULARY for i in range(width)], text_module.DRAFT, draft=0)]

        config = DecodingConfig(method=method, block_size=n, max_blocks=max_blocks, spawn_ratio=0.3, **shared)
        sources = {
            "random": lambda i: shuffled.randrange(VOCABULARY),
            "wrong": lambda i, right=right: (right(i) + 1) % VOCABULARY,
            "right": right,
            "hopeless": lambda i: 0,
        }
        for name, token in sources.items():
            draw = lambda self, start, count, stream, token=token: torch.tensor([token(start + i) for i in range(count)], dtype=torch.long)  # noqa: E731
            monkeypatch.setattr(ContextDrafts, "draw", draw)
            monkeypatch.setattr(Text, "propose", hopeless if name == "hopeless" else propose)
            found = generate(MODEL, torch.tensor(prompt), config, rules=rules, prompt_id=key)
            fewest, most = math.ceil(len(answer) / n), len(answer)
            assert found.new_tokens.tolist() == answer
            assert fewest <= found.stats.forwards <= most
            assert name != "right" or found.stats.forwards == fewest
            assert name != "hopeless" or found.stats.forwards == most


@pytest.mark.parametrize(("method", "committed"), [(Method.jacobi, [1, 4] * 4), (Method.running_window, [1, 5, 1, 5, 1, 5, 1, 1])])
def test_refreshed_predictions_are_the_next_draft(monkeypatch, method, committed):
    """Where every next token depends on its place alone, one forward over wrong guesses (block 5) makes the whole next draft right."""
    answer = [i * 7 % 11 for i in range(20)]
    monkeypatch.setattr(ContextDrafts, "draw", lambda self, start, count, stream: torch.full((count,), 11))
    text = Text(torch.tensor([1]), DecodingConfig(method=method, block_size=5, max_new_tokens=20), NO_EOS, prompt_id=0)
    verdict = True
    while verdict:
        chains = text.propose()
        positions, _ = text.places(chains, with_prefixes=False)
        verdict = text.receive(chains, text.read(chains, [answer[p] for p in positions]))
    assert text.answer == answer
    assert text.stats.committed_per_forward == committed


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


def test_candidates_never_copy_the_cache(monkeypatch):
    """Most bytes the cache ever holds: those of AR's, and of the tokens of one forward beside it; nothing grows with the number of forwards."""
    held = []
    keep, logits_of = CachedForward.keep, CachedForward.logits_of

    def bytes_of(forward):
        return sum(tensor.numel() * tensor.element_size() for layer in forward.cache.layers for tensor in (layer.keys, layer.values))

    def watched(self, requests):
        found = logits_of(self, requests)
        held.append(bytes_of(self))
        return found

    monkeypatch.setattr(CachedForward, "logits_of", watched)
    monkeypatch.setattr(CachedForward, "keep", lambda self, verdicts: keep(self, verdicts) or held.append(bytes_of(self)))
    prompt, peaks = torch.tensor([9, 8, 7, 9, 8, 7]), {}
    for name, config in {
        "ar": DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=90),
        "mr": DecodingConfig(method=Method.mr, block_size=8, max_new_tokens=90, spawn_ratio=0.2, ngram=True, drafts=2),
    }.items():
        held.clear()
        stats = generate(MODEL, prompt, config, rules=NO_EOS).stats
        peaks[name] = max(held)
    token = peaks["ar"] // (len(prompt) + 90 - 1)
    assert peaks["mr"] <= peaks["ar"] + token * max(stats.fed_per_forward)
