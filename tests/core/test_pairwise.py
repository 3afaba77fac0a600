"""Every pair of knob values, over hundreds of drawn prompts per model: parallel decoding is AR decoding, token for token, in fp64.

The drafts' content is attacked in test_candidates, ends of texts in test_stops.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.doctor import plain_greedy
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.text import NGRAM, RECYCLED
from tests.core.tiny import FAMILIES, random_prompts, tiny_model, tiny_rules

KNOBS = {
    "method": [m for m in Method if m is not Method.ar],
    "block_size": [1, 2, 3, 8, 17],
    "max_blocks": [1, 2, 3],
    "pool_size": [0, 1, 4],
    "ngram": [False, True],
    "verification_size": [1, 2, 4],
    "spawn_ratio": [0.2, 0.85, 1.0],
    "drafts": [1, 2, 3],
    "auto": [False, True],
    "temperature": [0.0, 0.8],
}
PROMPTS = 200  # per model
WEIGHTS = (0.5, 0.1)  # initializer ranges: a varied text, where little is accepted, and one that repeats itself


def pairs(row: dict) -> set:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def pairwise(knobs: dict[str, list], count: int, seed: int) -> list[dict]:
    """`count` combinations that hold every pair of values of two knobs: each takes a missing pair and, of some draws, the richest one."""
    draw, rows = random.Random(seed), []
    missing = [dict([a, b]) for p, q in itertools.combinations(knobs, 2) for a in ((p, v) for v in knobs[p]) for b in ((q, v) for v in knobs[q])]
    draw.shuffle(missing)
    todo = {frozenset(pair.items()) for pair in missing}
    for _ in range(count):
        start = next((pair for pair in missing if frozenset(pair.items()) in todo), {})
        drawn = [{name: draw.choice(values) for name, values in knobs.items()} | start for _ in range(30 if start else 1)]
        rows.append(max(drawn, key=lambda row: len(pairs(row) & todo)))
        todo -= pairs(rows[-1])
    return rows


def cases(family: str) -> list[tuple[dict, list[int], dict]]:
    """(knobs, prompt, what else is drawn) per prompt of a model."""
    seed = list(FAMILIES).index(family)
    draw = random.Random(seed)
    prompts = random_prompts(PROMPTS, seed=seed)
    more = [
        {"cap": draw.randint(1, 36), "eos": tuple(draw.sample(range(60), draw.choice([0, 0, 3, 8]))), "seed": draw.randint(0, 9)} for _ in prompts
    ]
    return list(zip(pairwise(KNOBS, PROMPTS, seed), prompts, more, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_values_is_covered(family):
    wanted = {frozenset([(p, v), (q, w)]) for p, q in itertools.combinations(KNOBS, 2) for v in KNOBS[p] for w in KNOBS[q]}
    rows = [row for row, _, _ in cases(family)]
    assert len(rows) >= 200
    assert set().union(*map(pairs, rows)) == wanted
    # the generator itself needs few: what follows is free to be random
    assert set().union(*map(pairs, rows[:60])) == wanted


def ar_answer(model, prompt, rules, cap, seed, key, temperature):
    """Greedy by a loop that shares no code with the decoder; sampled by the decoder's own AR, which test_sampling holds to its distribution."""
    if not temperature:
        return plain_greedy(model, torch.tensor(prompt), max_new_tokens=cap, eos_ids=rules.eos_ids).tolist()
    config = DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=cap, seed=seed, temperature=temperature)
    return generate(model, torch.tensor(prompt), config, rules=rules, prompt_id=key).new_tokens.tolist()


def decoding(knobs: dict, **more) -> DecodingConfig:
    """What the config refuses together is brought to what it allows: one draft by the book, and no more drafts than are verified."""
    legal = {"drafts": 1, "auto": False} if knobs["method"] is Method.jacobi else {}
    return DecodingConfig(**{**knobs, "verification_size": max(knobs["verification_size"], knobs["drafts"]), **legal, **more})


def check(model, prompt, rules, ar, knobs, *, cap, seed, key):
    config = decoding(knobs, max_new_tokens=cap, seed=seed)
    found = generate(model, torch.tensor(prompt), config, rules=rules, prompt_id=key)
    assert found.new_tokens.tolist() == ar, (knobs, prompt, cap, seed, key, sorted(rules.eos_ids))
    assert found.stats.stop_reason == ("eos" if ar[-1] in rules.eos_ids else "length")
    assert found.stats.tokens == len(ar)
    assert found.stats.forwards <= len(ar)
    return found.stats


@pytest.mark.parametrize("family", FAMILIES)
def test_parallel_is_ar(family):
    models = [tiny_model(family, seed=1, initializer_range=spread) for spread in WEIGHTS]
    stops, sources, forwards, tokens = Counter(), Counter(), 0, 0
    for key, (knobs, prompt, drawn) in enumerate(cases(family)):
        model = models[key % len(models)]
        rules = tiny_rules(model, eos_ids=drawn["eos"])
        ar = ar_answer(model, prompt, rules, drawn["cap"], drawn["seed"], key, knobs["temperature"])
        stats = check(model, prompt, rules, ar, knobs, cap=drawn["cap"], seed=drawn["seed"], key=key)
        stops[stats.stop_reason] += 1
        sources += stats.accepted_from
        forwards, tokens = forwards + stats.forwards, tokens + stats.tokens
    # nothing above is worth much where no draft is ever accepted or every text ends alike
    assert min(stops["eos"], stops["length"]) >= 40
    assert min(sources[NGRAM], sources[RECYCLED]) >= 10
    assert tokens > 1.1 * forwards


@pytest.mark.slow
@pytest.mark.parametrize("method", KNOBS["method"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_product(family, method):
    models = [tiny_model(family, seed=2, initializer_range=spread) for spread in WEIGHTS]
    prompts, cap, answers = random_prompts(20, seed=9), 28, {}
    others = {name: values for name, values in KNOBS.items() if name != "method"} | {"drafts": [1, 3], "auto": [False]}
    for i, values in enumerate(itertools.product(*others.values())):
        knobs = dict(zip(others, values, strict=True)) | {"method": method}
        key, spread = i * 7 % len(prompts), i % len(models)
        model = models[spread]
        rules = tiny_rules(model, eos_ids=(10, 20) if key % 2 else ())
        which = (key, spread, knobs["temperature"])
        if which not in answers:
            answers[which] = ar_answer(model, prompts[key], rules, cap, 3, key, knobs["temperature"])
        check(model, prompts[key], rules, answers[which], knobs, cap=cap, seed=3, key=key)
