"""Adaptive width: what is fed is what pays by acceptance and latency; and a latency curve is read as it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jacobi_core.decoding import forwards
from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate, generate_batch
from jacobi_core.decoding.latency import LatencyCurve, measure_latency, tokens_held
from jacobi_core.decoding.pace import Pace
from jacobi_core.decoding.static_forward import StaticForward
from jacobi_core.decoding.text import DRAFT, NGRAM, RECYCLED, Chain
from tests.core.tiny import random_prompts, tiny_model, tiny_rules

FLAT = LatencyCurve((1, 256), (1.0, 1.0))
STEEP = LatencyCurve((1, 256), (1.0, 256.0))  # every token costs a whole forward


def main(length: int) -> Chain:
    return Chain(range(length), DRAFT, draft=0)


def seen(pace: Pace, chain: Chain, accepted: int, times: int = 600) -> Pace:
    for _ in range(times):
        pace.observe([chain], [accepted])
    return pace


def test_curve_is_a_line_between_points_and_on_from_the_last():
    curve = LatencyCurve((1, 2, 4), (1.0, 2.0, 6.0))
    assert [curve.at(m) for m in (1, 2, 3, 4, 5)] == [1.0, 2.0, 4.0, 6.0, 8.0]
    assert LatencyCurve((1,), (3.0,)).at(9) == 3.0


def test_free_forwards_take_everything_and_dear_ones_nothing():
    everything = Pace(FLAT).cut([main(31), Chain([5, 6], NGRAM)])
    assert [len(c.tokens) for c in everything] == [31, 2]
    nothing = Pace(STEEP).cut([main(31), Chain([5, 6], NGRAM)])
    assert [(len(c.tokens), c.draft) for c in nothing] == [(0, 0)]  # the main draft stays, without tokens: AR


def test_width_follows_the_running_acceptance_there_and_back():
    curve = LatencyCurve((1, 65), (1.0, 9.0))  # 1/8 of a forward per token
    pace = seen(Pace(curve), main(63), 63)
    assert len(pace.cut([main(63)])[0].tokens) == 63
    seen(pace, main(63), 3)
    assert 3 <= len(pace.cut([main(63)])[0].tokens) <= 15
    seen(pace, main(63), 0)
    assert len(pace.cut([main(63)])[0].tokens) == 0
    for _ in range(300):  # nothing is tried, and what was seen fades
        pace.observe([main(0)], [0])
    assert len(pace.cut([main(63)])[0].tokens) > 0


@pytest.mark.parametrize("rows", [1, 16])
def test_what_was_seen_fades_by_forwards_however_many_texts_share_them(rows):
    """Wide drafts that bring nothing are not tried again at once because sixteen texts have told of sixteen forwards' worth."""
    pace = seen(Pace(LatencyCurve((1, 65), (1.0, 9.0)), rows=rows), main(63), 0, times=600 * rows)
    seen(pace, main(0), 0, times=20 * rows)
    assert dict(pace._widths.expected(64))[64] < 1.1
    seen(pace, main(0), 0, times=1000 * rows)
    assert dict(pace._widths.expected(64))[64] > 4.0  # nearly as before anything was seen


def test_a_source_that_never_wins_is_left_out_beside_one_that_does():
    pace = Pace(LatencyCurve((1, 65), (1.0, 9.0)))
    chains = [main(31), Chain([1] * 31, RECYCLED), Chain([2] * 31, NGRAM)]
    for _ in range(100):
        pace.observe(chains, [0, 0, 20])
    kept = pace.cut(chains)
    assert [c.source for c in kept] == [DRAFT, NGRAM]
    assert len(kept[0].tokens) == 0
    assert len(kept[1].tokens) >= 15


def test_more_rows_make_a_token_dearer():
    """By the curve of so many; one is measured for each number of them."""
    alone = Pace(LatencyCurve((1, 64, 65, 512), (1.0, 1.0, 2.0, 8.0)))  # flat up to 64 tokens: eight rows fill that with 8 each
    together = Pace(LatencyCurve((1, 8, 64), (1.0, 1.0, 8.0)), rows=8)
    assert len(alone.cut([main(63)])[0].tokens) == 63
    assert len(together.cut([main(63)])[0].tokens) == 7


def test_a_batchs_curve_is_by_each_texts_tokens_and_ends_where_it_gets_slow(monkeypatch):
    curve = forwards.batch_latency(tiny_model(seed=7), 8, 16)
    assert curve.tokens == (1, 2, 4, 8, 16) and list(curve.seconds) == sorted(curve.seconds)
    monkeypatch.setattr(forwards, "BATCH_LIMIT", 0.0)
    assert forwards.batch_latency(tiny_model(seed=7), 8, 16).tokens == (1, 2)  # two at least: from one nothing can be said about any other


def test_a_slow_width_is_not_fed_as_often():
    model = tiny_model(seed=7)
    often, seldom = CachedForward(model), CachedForward(model)
    measure_latency(often, [1, 2])
    measure_latency(seldom, [1, 2], limit=0.0)
    assert (often.length, seldom.length) == (tokens_held([1, 2]), tokens_held([1, 2]) - 9)  # five and two forwards of each, and of both in chains


def test_the_curve_is_measured_once_per_model(monkeypatch):
    model, calls = tiny_model(seed=7), []
    monkeypatch.setattr(forwards, "measure_latency", lambda forward, widths, **more: calls.append(widths) or measure_latency(forward, widths, **more))
    config = DecodingConfig(method=Method.running_window, block_size=20, auto=True)
    pace = forwards.pace_of(model, config)
    assert forwards.pace_of(model, replace(config, max_new_tokens=7, seed=1)) is pace
    assert forwards.pace_of(model, replace(config, block_size=31)) is not pace
    assert calls == [[1, 2, 4, 8, 16, 32]]
    forwards.pace_of(model.to(torch.float32), config)
    forwards.pace_of(model, config, rows=2)
    assert len(calls) == 3  # another dtype, and more rows, are another matter
    assert forwards.pace_of(model, replace(config, auto=False)) is None


def test_what_one_setting_has_taught_another_does_not_know(monkeypatch):
    """Else what comes second in a search is judged by what came first, and differs from the same setting alone."""
    model, dear = tiny_model(seed=7), LatencyCurve((1, 65), (1.0, 9.0))
    monkeypatch.setattr(forwards, "measure_latency", lambda *_, **__: dear)
    config = DecodingConfig(method=Method.running_window, block_size=64, auto=True)
    fresh = len(Pace(dear).cut([main(63)])[0].tokens)
    seen(forwards.pace_of(model, config), main(63), 0)
    assert len(forwards.pace_of(model, config).cut([main(63)])[0].tokens) == 0 < fresh
    for other in ({"ngram": True}, {"method": Method.mr}, {"drafts": 2}, {"temperature": 0.7}):
        assert len(forwards.pace_of(model, replace(config, **other)).cut([main(63)])[0].tokens) == fresh, other


@pytest.mark.parametrize("static", [False, True])
def test_a_measured_curve_never_falls(static):
    model, widths = tiny_model(seed=7), [1, 2, 4, 8]
    forward = StaticForward(model, capacity=tokens_held(widths), widths=widths) if static else CachedForward(model)
    curve = measure_latency(forward, widths)
    assert forward.length == tokens_held(widths)
    assert curve.tokens == (1, 2, 4, 8)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.seconds[0] > 0


@pytest.mark.parametrize("curve", [FLAT, STEEP], ids=["flat", "steep"])
def test_the_text_is_ars_whatever_the_machine(monkeypatch, curve):
    model = tiny_model(seed=2, initializer_range=0.1)
    rules = tiny_rules(model, eos_ids=(10,))
    monkeypatch.setattr(forwards, "measure_latency", lambda *_, **__: curve)
    config = DecodingConfig(method=Method.mr, block_size=8, max_new_tokens=40, ngram=True, drafts=2, auto=True)
    prompts = random_prompts(4, seed=3)
    together = generate_batch(model, prompts, config, rules=rules)
    for key, prompt in enumerate(prompts):
        ar = generate(model, torch.tensor(prompt), DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=40), rules=rules)
        auto = generate(model, torch.tensor(prompt), config, rules=rules, prompt_id=key)
        assert auto.new_tokens.tolist() == together[key].new_tokens.tolist() == ar.new_tokens.tolist()
        if curve is STEEP:  # and there it is AR, forward by forward
            assert auto.stats.fed_per_forward[1:] == [1] * (auto.stats.forwards - 1)


def test_nothing_wider_than_the_context_is_measured():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=2, n_positions=128, eos_token_id=3)).eval()
    config = DecodingConfig(
        method=Method.mr, block_size=32, max_new_tokens=12, auto=True
    )  # up to 128 tokens in a forward: more than the table has left
    prompt = torch.tensor([5, 6, 7])
    ar = generate(model, prompt, DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=12))
    assert generate(model, prompt, config).new_tokens.tolist() == ar.new_tokens.tolist()


def test_what_the_book_decodes_is_not_adapted():
    for settings in ({"auto": True}, {"drafts": 2}):
        with pytest.raises(ValueError, match="method=jacobi"):
            DecodingConfig(method=Method.jacobi, **settings)
    with pytest.raises(ValueError, match="verification_size"):
        DecodingConfig(method=Method.mr, drafts=5)
