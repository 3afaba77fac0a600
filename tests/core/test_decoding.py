"""Parallel decoding is greedy AR decoding, token for token, in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.drafts import ContextDrafts, first_guess
from jacobi_core.decoding.equivalence import compare_with_ar
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.greedy_batch import greedy_batch
from jacobi_core.decoding.tokens import TokenRules, eos_id_set
from tests.core.tiny import EOS, FAMILIES, VOCABULARY, random_prompts, tiny_model, tiny_rules

PARALLEL = tuple(m for m in Method if m is not Method.ar)
MODELS = {(family, tied): tiny_model(family, tied=tied, seed=1) for family in FAMILIES for tied in (True, False)}


def naive_greedy(model, prompt, cap, eos_ids):
    """Greedy AR without any cache: the definition."""
    text = list(prompt)
    for _ in range(cap):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        if text[-1] in eos_ids:
            break
    return text[len(prompt) :]


def run(model, prompt, method, n, cap, rules, **kwargs):
    return generate(model, torch.tensor(prompt), DecodingConfig(method=method, block_size=n, max_new_tokens=cap), rules=rules, **kwargs)


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_ar_is_greedy_by_definition(family, tied):
    model = MODELS[family, tied]
    rules = tiny_rules(model)
    for prompt in random_prompts(4, seed=3):
        generation = run(model, prompt, Method.ar, 1, 20, rules)
        assert generation.new_tokens.tolist() == naive_greedy(model, prompt, 20, rules.eos_ids)
        assert generation.stats.tpf == 1.0


@settings(max_examples=150, deadline=None)
@given(
    model=st.sampled_from(list(MODELS)),
    method=st.sampled_from(PARALLEL),
    n=st.sampled_from([1, 2, 3, 8, 17]),
    cap=st.integers(1, 40),
    prompt_seed=st.integers(0, 10_000),
    guess_seed=st.integers(0, 3),
    max_blocks=st.sampled_from([1, 2, 3]),
    pool_size=st.sampled_from([0, 1, 4]),
    ngram=st.booleans(),
    verification_size=st.integers(1, 5),
    spawn_ratio=st.sampled_from([0.2, 0.85, 1.0]),
    eos=st.sets(st.integers(0, VOCABULARY - 1), max_size=8),
)
def test_parallel_equals_ar(model, method, n, cap, prompt_seed, guess_seed, eos, **knobs):
    model = MODELS[model]
    rules = tiny_rules(model, eos_ids=tuple(eos))
    prompt = random_prompts(1, seed=prompt_seed)[0]
    ar = run(model, prompt, Method.ar, 1, cap, rules)
    config = DecodingConfig(method=method, block_size=n, max_new_tokens=cap, seed=guess_seed, **knobs)
    parallel = generate(model, torch.tensor([prompt]), config, rules=rules, prompt_id=prompt_seed)
    assert parallel.new_tokens.tolist() == ar.new_tokens.tolist()
    assert parallel.stats.stop_reason == ar.stats.stop_reason
    assert parallel.stats.tokens == len(parallel.new_tokens) <= cap
    assert parallel.stats.forwards <= ar.stats.forwards
    assert sum(parallel.stats.accepted_from.values()) == parallel.stats.tokens
    if n == 1 and method in (Method.jacobi, Method.running_window):
        assert parallel.stats.tpf == 1.0


@pytest.mark.parametrize("method", PARALLEL)
@pytest.mark.parametrize("offset", range(17))
def test_eos_at_every_offset_ends_the_text_there(method, offset):
    model = MODELS["qwen2", True]
    prompt = random_prompts(1, seed=11)[0]
    text = naive_greedy(model, prompt, 40, frozenset())
    rules = tiny_rules(model, eos_ids=(text[offset],))
    end = text.index(text[offset])  # it may occur earlier
    ends = [i for i, token in enumerate(text) if token in rules.eos_ids]
    end = min(end, ends[0])
    generation = run(model, prompt, method, 8, 40, rules)
    assert generation.new_tokens.tolist() == text[: end + 1]
    assert generation.stats.stop_reason == "eos"
    assert generation.stats.tokens == end + 1


@pytest.mark.parametrize("method", PARALLEL)
def test_exact_cap(method):
    model = MODELS["llama", False]
    rules = TokenRules(eos_ids=frozenset(), vocabulary_size=VOCABULARY, special_ids=frozenset())
    for cap in range(1, 17):
        generation = run(model, [7, 8, 9], method, 8, cap, rules)
        assert len(generation.new_tokens) == cap
        assert generation.stats.stop_reason == "length"


def test_a_repetitive_text_is_decoded_in_few_forwards():
    """Random guesses from the context hit a text that repeats one token: acceptance is real, not only safe."""
    model = tiny_model(seed=2, initializer_range=0.02)
    rules = TokenRules(eos_ids=frozenset(), vocabulary_size=VOCABULARY, special_ids=frozenset())
    prompt = [9] * 4
    ar = run(model, prompt, Method.ar, 1, 32, rules)
    assert len(set(ar.new_tokens[8:].tolist())) == 1
    generation = run(model, prompt, Method.running_window, 8, 32, rules)
    assert generation.new_tokens.tolist() == ar.new_tokens.tolist()
    assert generation.stats.tpf > 2


def test_same_guess_every_time_and_for_every_prompt_id():
    model = MODELS["qwen3", True]
    rules = tiny_rules(model)
    runs = [run(model, [5, 6, 7], Method.jacobi, 8, 30, rules, prompt_id=4).stats.committed_per_forward for _ in range(2)]
    assert runs[0] == runs[1]


@settings(max_examples=25, deadline=None)
@given(model=st.sampled_from(list(MODELS)), rows=st.integers(1, 5), seed=st.integers(0, 1000), cap=st.integers(1, 24))
def test_greedy_batch_equals_each_row_alone(model, rows, seed, cap):
    model = MODELS[model]
    rules = tiny_rules(model, eos_ids=(10, 20, 30))
    prompts = random_prompts(rows, seed=seed)
    for prompt, answer in zip(prompts, greedy_batch(model, prompts, max_new_tokens=cap, rules=rules), strict=True):
        alone = run(model, prompt, Method.ar, 1, cap, rules)
        assert answer.tokens.tolist() == alone.new_tokens.tolist()
        assert answer.stop_reason == alone.stats.stop_reason


def test_eager_attention_gives_the_same_batch():
    prompts = random_prompts(3, seed=8)
    model = tiny_model("llama", seed=5, dtype=torch.float32)  # transformers' eager softmax runs in fp32, where fp64's lowest is -inf
    expected = greedy_batch(model, prompts, max_new_tokens=16, rules=tiny_rules(model))
    model.set_attn_implementation("eager")
    for a, b in zip(expected, greedy_batch(model, prompts, max_new_tokens=16, rules=tiny_rules(model)), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()


def test_rollback_is_exact():
    model = MODELS["qwen2", False]
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.inference_mode():
        forward = CachedForward(model)
        full = forward(ids)
        for length in (5, 3, 0):
            forward.rollback(length)
            assert forward.length == length
            again = forward(ids[:, length:]) if length < 5 else full[:, 5:]
            torch.testing.assert_close(again, full[:, length:])
        for length in (6, -1):
            with pytest.raises(ValueError, match="roll"):
                forward.rollback(length)


def test_eos_ids_from_every_form():
    assert eos_id_set(None, 3, [4, 5], torch.tensor([6]), frozenset({7})) == frozenset({3, 4, 5, 6, 7})
    assert eos_id_set(None) == frozenset()
    assert tiny_rules(MODELS["qwen2", True]).eos_ids == frozenset(EOS)


def test_drafts_are_real_context_tokens():
    rules = TokenRules(eos_ids=frozenset({3}), vocabulary_size=50, special_ids=frozenset({1, 3}))
    drafts = ContextDrafts(torch.tensor([1, 3, 7, 55, 9]), prompt_id=1, seed=0, rules=rules, capacity=10)
    drafts.append(torch.tensor([12, 3]))
    assert set(drafts.draw(0, 200).tolist()) == {7, 9, 12}
    only_special = ContextDrafts(torch.tensor([1, 3]), prompt_id=1, seed=0, rules=rules, capacity=10)
    assert {1, 3}.isdisjoint(only_special.draw(0, 500).tolist())
    assert max(only_special.draw(0, 500).tolist()) < 50


@given(
    prompt=st.lists(st.integers(0, 49), min_size=1, max_size=8),
    asked=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 300), st.integers(0, 2), st.lists(st.integers(0, 49), max_size=3)), max_size=8),
)
def test_a_guess_is_a_function_of_position_and_context_whatever_was_asked_before(prompt, asked):
    rules = TokenRules(eos_ids=frozenset({3}), vocabulary_size=50, special_ids=frozenset({1, 3}))
    drafts = ContextDrafts(torch.tensor(prompt), prompt_id=5, seed=2, rules=rules, capacity=24)
    context = [t for t in prompt if t not in (1, 3)]
    for start, count, stream, committed in asked:
        positions = torch.arange(start, start + count).unsqueeze(0) + (stream << 40)
        pool, key = torch.tensor([context], dtype=torch.long), torch.tensor([5])
        expected = first_guess(pool, torch.tensor(len(context)), positions, prompt_ids=key, seed=2, rules=rules)[0]
        assert drafts.draw(start, count, stream=stream).tolist() == expected.tolist()
        drafts.append(torch.tensor(committed, dtype=torch.long))
        context += [t for t in committed if t not in (1, 3)]


def test_bad_input_is_refused_by_name():
    model = MODELS["qwen2", True]
    with pytest.raises(ValueError, match="block_size"):
        DecodingConfig(block_size=0)
    with pytest.raises(ValueError, match="max_new_tokens"):
        DecodingConfig(max_new_tokens=0)
    with pytest.raises(ValueError, match="one prompt"):
        generate(model, torch.zeros(2, 3, dtype=torch.long), DecodingConfig(max_new_tokens=4))
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, torch.zeros(0, dtype=torch.long), DecodingConfig(max_new_tokens=4))
    with pytest.raises(ValueError, match="context of 512"):
        generate(model, torch.tensor([5]), DecodingConfig(max_new_tokens=512))
    sliding = tiny_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_window"):
        generate(sliding, torch.tensor([5]), DecodingConfig(max_new_tokens=4))


def test_difference_names_index_and_margin():
    model = MODELS["qwen2", True]
    prompt = torch.tensor([5, 6, 7])
    rules = TokenRules(eos_ids=frozenset(), vocabulary_size=VOCABULARY, special_ids=frozenset())
    ar = run(model, prompt.tolist(), Method.ar, 1, 12, rules).new_tokens
    assert compare_with_ar(model, prompt, ar, ar.clone()) is None
    wrong = ar.clone()
    wrong[4] = (wrong[4] + 1) % VOCABULARY
    difference = compare_with_ar(model, prompt, ar, wrong)
    assert difference.first_index == 4
    assert difference.margin > 1e-3
    assert difference.kind == "defect"
    assert compare_with_ar(model, prompt, ar, ar[:7]).first_index == 7
