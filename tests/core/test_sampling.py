"""Sampling: parallel decoding is the AR sampler with the same noise, and that sampler draws from the model's distribution."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from jacobi_core.decoding.choose import Chooser, warpers
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate, generate_batch
from jacobi_core.decoding.tokens import TokenRules
from tests.core.tiny import FAMILIES, random_prompts, tiny_model, tiny_rules

MODELS = {family: tiny_model(family, seed=1, initializer_range=0.15) for family in FAMILIES}
DRAWS = 200_000


@settings(max_examples=60, deadline=None)
@given(
    family=st.sampled_from(list(MODELS)),
    method=st.sampled_from([m for m in Method if m is not Method.ar]),
    n=st.sampled_from([1, 2, 3, 8, 17]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    penalty=st.sampled_from([None, 1.4]),
    seed=st.integers(0, 1000),
)
def test_parallel_samples_equal_ar_samples(family, method, n, temperature, top_k, top_p, min_p, penalty, seed):
    model = MODELS[family]
    rules = tiny_rules(model, eos_ids=(10, 20))
    prompt = torch.tensor(random_prompts(1, seed=seed)[0])
    shared = dict(max_new_tokens=24, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    more = dict(rules=rules, prompt_id=seed, processors=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)]) if penalty else None)
    ar = generate(model, prompt, DecodingConfig(method=Method.ar, block_size=1, **shared), **more)
    parallel = generate(model, prompt, DecodingConfig(method=method, block_size=n, ngram=True, **shared), **more)
    assert parallel.new_tokens.tolist() == ar.new_tokens.tolist()
    assert parallel.stats.stop_reason == ar.stats.stop_reason


def p_value(counts: list[int], probabilities: list[float]) -> float:
    """Of Pearson's chi-square test (Wilson-Hilferty approximation of its upper tail)."""
    total = sum(counts)
    cells = [(c, p * total) for c, p in zip(counts, probabilities, strict=True) if p > 0]
    assert sum(counts) == sum(c for c, _ in cells), "a token of probability 0 was drawn"
    chi2, freedom = sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1
    z = ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], dtype=torch.float64)
SAMPLERS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
]


NOISE: dict = {}  # drawn once for all samplers: it belongs to the position, whatever it is added to


def draws(choose: Chooser) -> list[int]:
    counts, choose._noise = [0] * 6, NOISE
    for start in range(0, DRAWS, 5000):
        for token in choose(LOGITS.expand(5000, 6), range(start, start + 5000)).argmax(-1).tolist():
            counts[token] += 1
    return counts


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_samples_follow_the_distribution(sampler):
    processors = warpers(DecodingConfig(**sampler))
    expected = (processors(None, LOGITS[None].clone())[0] if processors else LOGITS).softmax(-1).tolist()
    assert p_value(draws(Chooser(processors, sample=True, seed=0, prompt_id=7)), expected) > 1e-3


def test_the_test_rejects_a_biased_sampler():
    biased = (LOGITS + torch.tensor([0.03, 0, 0, 0, 0, 0])).softmax(-1).tolist()
    assert p_value(draws(Chooser(LogitsProcessorList(), sample=True, seed=0, prompt_id=7)), biased) < 1e-3


TALKER = tiny_model("qwen2", vocab_size=6, initializer_range=0.3, eos_token_id=5, bos_token_id=0, pad_token_id=None)
TALKER_RULES = TokenRules(eos_ids=frozenset({5}), vocabulary_size=6, special_ids=frozenset({5}))
TALKER_SAMPLERS = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 4}, {"temperature": 1.3, "top_p": 0.9}]


@cache
def next_logits(text: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return TALKER(input_ids=torch.tensor([[1, *text]]), use_cache=False).logits[0, -1]


def all_texts(sampler: dict, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every text of `length` tokens, or fewer where EOS (5) ends it."""
    processors, done, open_texts = warpers(DecodingConfig(**sampler)), {}, {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, p in open_texts.items():
            logits = next_logits(text)[None].clone()
            probabilities = (processors(None, logits) if processors else logits)[0].softmax(-1).tolist()
            for token, q in enumerate(probabilities):
                (done if token == 5 else longer)[*text, token] = p * q
        open_texts = longer
    return done | open_texts


def texts_p_value(texts: list[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """Chi-square over whole texts; rare ones are pooled until at least 8 of a cell are expected."""
    counts, cells = Counter(texts), [[0, 0.0]]
    assert set(counts) <= {text for text, p in probabilities.items() if p > 0}
    for text, p in sorted(probabilities.items(), key=lambda item: item[1]):
        if cells[-1][1] * len(texts) >= 8:
            cells.append([0, 0.0])
        cells[-1][0] += counts[text]
        cells[-1][1] += p
    return p_value(*zip(*cells, strict=True))


def chosen_texts(sampler: dict, bias: float = 0.0) -> list[tuple[int, ...]]:
    """Texts of up to 3 tokens, 200k draws in all, token by token from the model's logits (plus a bias towards token 1)."""
    choose = Chooser(warpers(DecodingConfig(**sampler)), sample=True, seed=0, prompt_id=7)
    choose._noise = NOISE
    texts, at, tilt = [], 0, bias * torch.eye(6, dtype=torch.float64)[1]
    while at < DRAWS:
        group = [()] * 4000
        for _ in range(3):
            running = [i for i, text in enumerate(group) if 5 not in text][: max(DRAWS - at, 0)]
            if running:
                logits = torch.stack([next_logits(group[i]) for i in running]) + tilt
                for i, token in zip(running, choose(logits, range(at, at + len(running))).argmax(-1).tolist(), strict=True):
                    group[i] = (*group[i], token)
            at += len(running)
        if at < DRAWS:
            texts += group
    return texts


@pytest.mark.parametrize("sampler", TALKER_SAMPLERS, ids=str)
def test_texts_with_eos_follow_the_distribution(sampler):
    assert texts_p_value(chosen_texts(sampler), all_texts(sampler, 3)) > 1e-3


def test_texts_of_a_biased_sampler_are_rejected():
    assert texts_p_value(chosen_texts({"temperature": 1.0}, bias=0.04), all_texts({"temperature": 1.0}, 3)) < 1e-3


def generated_texts(sampler: dict, method: str, count: int = 2000) -> list[tuple[int, ...]]:
    """End to end: every text has its own prompt id, and so its own noise."""
    config = DecodingConfig(method=method, block_size=3, max_new_tokens=3, seed=1, ngram=True, **sampler)
    return [tuple(g.new_tokens.tolist()) for g in generate_batch(TALKER, [[1]] * count, config, rules=TALKER_RULES)]


@pytest.mark.parametrize(("sampler", "method"), list(zip(TALKER_SAMPLERS, ("mr", "jacobi", "running_window"), strict=True)), ids=str)
def test_generated_texts_follow_the_distribution(sampler, method):
    assert texts_p_value(generated_texts(sampler, method), all_texts(sampler, 3)) > 1e-3


def test_generated_texts_of_a_biased_sampler_are_rejected(monkeypatch):
    call = Chooser.__call__

    def biased(self, logits, positions, prefixes=None):
        return call(self, logits + 0.5 * torch.eye(6, dtype=logits.dtype)[1], positions, prefixes)

    monkeypatch.setattr(Chooser, "__call__", biased)
    assert texts_p_value(generated_texts({"temperature": 1.0}, "mr"), all_texts({"temperature": 1.0}, 3)) < 1e-3


def test_a_processor_that_keeps_state_is_refused_by_name():
    class WatermarkLogitsProcessor(LogitsProcessor):
        pass

    with pytest.raises(ValueError, match="WatermarkLogitsProcessor"):
        generate(MODELS["qwen2"], torch.tensor([5]), DecodingConfig(max_new_tokens=4), processors=LogitsProcessorList([WatermarkLogitsProcessor()]))


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"top_p": 0.0, "temperature": 1.0}, {"top_k": 5}, {"min_p": 2.0, "temperature": 1.0}])
def test_settings_that_do_nothing_or_harm_are_refused(settings):
    with pytest.raises(ValueError, match="temperature"):
        DecodingConfig(**settings)
