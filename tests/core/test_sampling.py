"""Sampling: parallel decoding is the AR sampler with the same noise, and that sampler draws from the model's distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from jacobi_core.decoding.choose import Chooser, warpers
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate
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


def draws(choose: Chooser) -> list[int]:
    counts = [0] * 6
    for start in range(0, DRAWS, 5000):
        for token in choose(LOGITS.expand(5000, 6), range(start, start + 5000)):
            counts[token] += 1
        choose.forget_before(start + 5000)
    return counts


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_samples_follow_the_distribution(sampler):
    processors = warpers(DecodingConfig(**sampler))
    expected = (processors(None, LOGITS[None].clone())[0] if processors else LOGITS).softmax(-1).tolist()
    assert p_value(draws(Chooser(processors, sample=True, seed=0, prompt_id=7)), expected) > 1e-3


def test_the_test_rejects_a_biased_sampler():
    biased = (LOGITS + torch.tensor([0.03, 0, 0, 0, 0, 0])).softmax(-1).tolist()
    assert p_value(draws(Chooser(LogitsProcessorList(), sample=True, seed=0, prompt_id=7)), biased) < 1e-3


def test_a_processor_that_keeps_state_is_refused_by_name():
    class WatermarkLogitsProcessor(LogitsProcessor):
        pass

    with pytest.raises(ValueError, match="WatermarkLogitsProcessor"):
        generate(MODELS["qwen2"], torch.tensor([5]), DecodingConfig(max_new_tokens=4), processors=LogitsProcessorList([WatermarkLogitsProcessor()]))


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"top_p": 0.0, "temperature": 1.0}, {"top_k": 5}, {"min_p": 2.0, "temperature": 1.0}])
def test_settings_that_do_nothing_or_harm_are_refused(settings):
    with pytest.raises(ValueError, match="temperature"):
        DecodingConfig(**settings)
