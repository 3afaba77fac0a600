"""Continuous batching: who joins and leaves beside a text changes nothing of it; memory and rows stay bounded; stop strings cut where they are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import NOT_FINITE, generate
from jacobi_core.decoding.latency import LatencyCurve
from jacobi_core.serving import engine as engine_module
from jacobi_core.serving.admission import Limits, Need
from jacobi_core.serving.answer_text import AnswerText
from jacobi_core.serving.engine import FAILED, Engine
from tests.core.test_stream import TOKENIZERS, cut, final
from tests.core.tiny import FAMILIES, random_prompts, tiny_model, tiny_rules

MODELS = {family: tiny_model(family, seed=1) for family in FAMILIES}
AR = DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=20)
WINDOW = DecodingConfig(method=Method.running_window, block_size=4, max_new_tokens=20)


@st.composite
def configs(draw: st.DrawFn) -> DecodingConfig:
    method = draw(st.sampled_from(list(Method)))
    plain = method in (Method.ar, Method.jacobi)
    return DecodingConfig(
        method=method,
        block_size=1 if method is Method.ar else draw(st.sampled_from([2, 5, 8])),
        max_new_tokens=draw(st.integers(1, 30)),
        ngram=method is not Method.ar and draw(st.booleans()),
        auto=not plain and draw(st.booleans()),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.8])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data(), family=st.sampled_from(list(MODELS)), rows=st.integers(1, 5), kv_tokens=st.integers(200, 600))
def test_every_answer_is_its_run_alone_whoever_joins_leaves_or_is_cancelled(data, family, rows, kv_tokens):
    model = MODELS[family]
    rules, limits = tiny_rules(model, eos_ids=(10, 20)), Limits(rows, kv_tokens, prefill_tokens=data.draw(st.sampled_from([1, 20, 500])))
    engine = Engine(model, rules, limits)
    engine._curves = dict.fromkeys((1, 2, 4, 8), LatencyCurve((1, 2, 64), (1.0, 1.01, 2.0)))
    asked, said, ended, cancelled, began = {}, {}, {}, set(), []

    def iterate():
        for event in engine.step():
            assert event.id not in cancelled and event.id not in ended
            said[event.id] += event.tokens
            if event.began:
                began.append(event.id)
            if event.reason:
                ended[event.id] = event
        assert engine.running <= limits.rows
        assert engine.reserved <= limits.kv_tokens

    for _ in range(data.draw(st.integers(1, 15))):
        for _ in range(data.draw(st.integers(0, 3))):
            config, prompt = data.draw(configs()), random_prompts(1, seed=data.draw(st.integers(0, 99)), longest=20)[0]
            job = engine.submit(prompt, config)
            asked[job], said[job] = (prompt, config), []
        if asked and data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(sorted(asked)))
            engine.cancel(gone)
            cancelled |= {gone} - set(ended)
        iterate()
    for _ in range(3000):
        if not engine.running and not engine.waiting:
            break
        iterate()
    assert set(ended) == set(asked) - cancelled, "everybody is answered"
    assert began == sorted(began), "first come, first served"
    assert engine.reserved == 0
    for job, (prompt, config) in asked.items():
        alone = generate(model, torch.tensor(prompt), replace(config, auto=False), rules=rules)
        if job in cancelled:
            assert said[job] == alone.new_tokens.tolist()[: len(said[job])]
            continue
        assert said[job] == alone.new_tokens.tolist()
        assert ended[job].reason == alone.stats.stop_reason
        if not config.auto:
            assert ended[job].stats == alone.stats


def run(engine: Engine) -> dict[int, list]:
    found: dict[int, list] = {}
    while engine.running or engine.waiting:
        for event in engine.step():
            found.setdefault(event.id, []).append(event)
    return found


def test_short_texts_are_not_held_up_by_a_long_one_and_a_row_is_free_at_once():
    model = tiny_model(seed=1)
    rules = replace(tiny_rules(model), eos_ids=frozenset())
    engine = Engine(model, rules, Limits(rows=2, kv_tokens=10_000))
    long = engine.submit([5], replace(AR, max_new_tokens=60))
    short = [engine.submit([6, 7], replace(AR, max_new_tokens=10)) for _ in range(5)]
    ends = []
    while engine.running or engine.waiting:
        ends += [event.id for event in engine.step() if event.reason]
    assert ends == [*short, long]


def test_a_long_prompt_begins_alone_and_who_comes_later_does_not_overtake_it():
    limits, small, large = Limits(rows=4, kv_tokens=400, prefill_tokens=50), Need(10, 20, 4), Need(200, 220, 4)
    assert limits.admitted([], [small, small, small]) == 3
    assert limits.admitted([], [small, large, small]) == 1  # 2 x 224 > 400
    assert limits.admitted([small], [large, small]) == 0
    assert limits.admitted([], [large, small]) == 1
    assert Limits(rows=4, kv_tokens=10**6, prefill_tokens=50).admitted([], [small, large]) == 1  # its prompt waits for the next iteration
    assert not limits.fit([Need(300, 420, 1)])


@settings(max_examples=200, deadline=None)
@given(
    needs=st.lists(
        st.builds(lambda p, a, w: Need(p, p + a, w), st.integers(1, 300), st.integers(1, 300), st.integers(1, 64)), min_size=1, max_size=9
    ),
    kv_tokens=st.integers(1, 6000),
    now=st.tuples(st.integers(0, 9), st.integers(0, 700)),
)
def test_buffers_hold_who_fits_and_never_more_than_the_memory(needs, kv_tokens, now):
    limits = Limits(rows=9, kv_tokens=kv_tokens)
    if not limits.fit(needs) or math.prod(now) > kv_tokens:
        return
    rows, columns = limits.shape(needs, now)
    assert rows >= len(needs) and columns >= limits.columns(needs)
    assert rows * columns <= kv_tokens


def test_a_text_whose_logits_break_is_ended_and_the_others_go_on(caplog):
    model = tiny_model(seed=1)
    engine = Engine(model, tiny_rules(model), Limits(rows=3, kv_tokens=4000))
    good, bad = engine.submit([5, 6] * 10, WINDOW), engine.submit([7, 8, 9] * 6, WINDOW)
    first = {event.id: event for event in engine.step()}
    with torch.inference_mode():
        for layer in engine._forward._layers:
            for buffer in layer._buffers:
                buffer[1, :, :18] = torch.nan
    later = engine.submit([7], WINDOW)  # gets the broken row's slot, and does not overwrite all of it
    found = run(engine)
    assert found[bad][-1].reason == NOT_FINITE and "not finite" in caplog.text
    for job, prompt in ((good, [5, 6] * 10), (later, [7])):
        tokens = [t for event in [first.get(job), *found[job]] if event for t in event.tokens]
        assert tokens == generate(model, torch.tensor(prompt), WINDOW, rules=engine.rules).new_tokens.tolist()


def test_an_error_in_a_forward_ends_who_is_in_flight_and_the_engine_goes_on(monkeypatch, caplog):
    model = tiny_model(seed=1)
    engine = Engine(model, tiny_rules(model), Limits(rows=1, kv_tokens=4000))
    first, second = engine.submit([5, 6], WINDOW), engine.submit([7], WINDOW)
    engine.step()
    monkeypatch.setattr(type(engine._forward), "logits_of", lambda *_: 1 / 0)
    assert [(e.id, e.reason) for e in engine.step()] == [(first, FAILED)]
    monkeypatch.undo()
    assert [t for event in run(engine)[second] for t in event.tokens] == generate(
        model, torch.tensor([7]), WINDOW, rules=engine.rules
    ).new_tokens.tolist()


@pytest.mark.parametrize(
    ("prompt", "config", "message"),
    [
        ([], WINDOW, "at least one token"),
        ([5, 60], WINDOW, "between 0 and 59"),
        ([-1], WINDOW, "between 0 and 59"),
        ([5] * 500, WINDOW, "exceed the model's context of 512 tokens"),
        ([5] * 300, replace(WINDOW, max_new_tokens=150), "exceed the 400 tokens of KV memory"),
    ],
)
def test_what_could_never_be_decoded_is_refused(prompt, config, message):
    engine = Engine(MODELS["llama"], tiny_rules(MODELS["llama"]), Limits(rows=2, kv_tokens=400))
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, config)
    assert engine.waiting == 0


def test_adaptive_drafts_shrink_where_many_share_the_machine():
    model = tiny_model(seed=1)
    config = replace(WINDOW, block_size=16, auto=True)
    rules = replace(tiny_rules(model), eos_ids=frozenset())

    def fed(rows: int) -> float:
        engine = Engine(model, rules, Limits(rows=rows, kv_tokens=100_000))
        engine._curves = {texts: LatencyCurve((1, 16 // texts + 1), (1.0, 1.1)) for texts in (1, 2, 4, 8, 16)}  # free up to 16 tokens of all
        jobs = [engine.submit(p, config) for p in random_prompts(rows, seed=3)]
        stats = [run(engine)[job][-1].stats for job in jobs[:1]]
        return sum(stats[0].fed_per_forward[1:]) / (stats[0].forwards - 1)

    assert fed(1) > 2 * fed(16)


def test_curves_of_as_many_texts_as_there_may_be_are_measured_before_the_first_request(monkeypatch):
    measured = []
    monkeypatch.setattr(
        engine_module, "batch_latency", lambda model, rows, widest: measured.append((rows, widest)) or LatencyCurve((1, 2), (1.0, 2.0))
    )
    model = MODELS["llama"]
    auto = replace(WINDOW, auto=True)
    engine = Engine(model, tiny_rules(model), Limits(rows=50, kv_tokens=100_000))
    engine.warm_up(auto)
    assert measured == [(1, 256), (2, 128), (4, 64), (8, 32), (16, 16), (32, 8), (64, 4)]
    for prompt in random_prompts(9, seed=3):
        engine.submit(prompt, auto)
    run(engine)
    assert len(measured) == 7
    measured.clear()
    small = Engine(model, tiny_rules(model), Limits(rows=50, kv_tokens=500))  # no room for more than four
    small.warm_up(auto)
    assert [rows for rows, _ in measured] == [1, 2, 4] and small._curve_of(50) is small._curve_of(4)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_text_ends_at_its_first_stop_string(name, data):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(
        data.draw(st.sampled_from(["the cat at the hat", "日本語 the\n\nat STOP a", "aaaaabaaab", "naïve 🙂🙃"])), add_special_tokens=False
    )
    stops = data.draw(st.lists(st.sampled_from(["at", "STOP", "aaab", "the h", "\n\n", "本", "🙃", "e c", "x"]), max_size=3))
    text, streamed, ended = AnswerText(tokenizer, stops), "", None
    for block in cut(ids, data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))):
        index = text(block)
        streamed += text.take()
        if index is not None:
            ended = index
            break
    streamed += text.end()
    whole = final(tokenizer, ids)
    places = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert streamed == (whole[: min(places)] if places else whole)
    assert ended is not None or not places or text.stopped  # only a text held back to its end is cut there
