"""The decoders that are timed: what they answer, what they count, and in what order they take turns. No timing is asserted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.greedy_batch import greedy_batch
from jacobi_core.decoding.static_forward import StaticForward
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.hub import load_model, load_tokenizer
from tasks import artifacts
from tasks.evaluate import decoders as module
from tasks.evaluate.config import EvaluateConfig, Reference, method_name
from tasks.evaluate.decoders import Answer, OurDecoder, StaticForwards, Timed, TransformersDecoder, neutral
from tasks.evaluate.loops import is_degenerate
from tasks.evaluate.speed import part_prompts, take_turns

TOKENS = 12


@pytest.fixture(scope="module")
def subject(prompts_folder, base_folder):
    """(model, rules, prompts of different lengths, their greedy answers)."""
    model = load_model(base_folder, dtype="float64")
    rules = TokenRules.of(model, load_tokenizer(base_folder))
    prompts = artifacts.read_prompts(prompts_folder, "test")
    (first, *_) = greedy_batch(model, [prompts[0].input_ids], max_new_tokens=TOKENS, rules=rules)
    rules = replace(rules, eos_ids=rules.eos_ids | {first.tokens[7].item()})  # so that an answer ends before the cap
    neutral(model, rules)
    answers = [a.tokens.tolist() for a in greedy_batch(model, [p.input_ids for p in prompts], max_new_tokens=TOKENS, rules=rules)]
    assert len({len(p.input_ids) for p in prompts}) > 1 and len({len(a) for a in answers}) > 1
    return model, rules, prompts, answers


def ours(subject, batch_size=1, **knobs):
    config = DecodingConfig(**{"method": "mr", "block_size": 4, "max_new_tokens": TOKENS, **knobs})
    return OurDecoder(subject[0], subject[1], config, batch_size=batch_size)


def theirs(subject, reference=Reference.transformers, batch_size=1):
    return TransformersDecoder(subject[0], subject[1], reference, batch_size=batch_size, max_new_tokens=TOKENS, lookup=3)


def test_everybody_says_the_same(subject):
    _, _, prompts, answers = subject
    for decoder in (ours(subject), theirs(subject), theirs(subject, Reference.prompt_lookup)):
        assert [decoder([p]).answers[0].tokens for p in prompts] == answers, decoder.method
    for decoder in (ours(subject, 5), theirs(subject, batch_size=5)):
        assert [a.tokens for a in decoder(prompts).answers] == answers, decoder.method


def test_what_is_counted(subject):
    _, rules, prompts, answers = subject
    timed = [
        (p, said, d([p]))
        for d in (ours(subject), theirs(subject), theirs(subject, Reference.prompt_lookup))
        for p, said in zip(prompts, answers, strict=True)
    ]
    for _, said, t in timed:
        (answer,) = t.answers
        assert sum(answer.accepted_lengths) == len(said) and min(answer.accepted_lengths) >= 1
        assert answer.stop_reason == ("eos" if said[-1] in rules.eos_ids else "length")
        assert 0 < t.prefill_seconds <= t.seconds
    plain = timed[len(prompts) : 2 * len(prompts)]
    assert all(t.answers[0].accepted_lengths == [1] * len(said) for _, said, t in plain)
    batch = theirs(subject, batch_size=5)(prompts)
    assert [a.stop_reason for a in batch.answers] == [t.answers[0].stop_reason for _, _, t in plain]
    assert [len(a.accepted_lengths) for a in ours(subject, 5)(prompts).answers] == [
        len(t.answers[0].accepted_lengths) for _, _, t in timed[: len(prompts)]
    ]


def test_forwards_are_those_of_the_model(subject):
    """The tokens committed per forward are as many as the model was called: nothing runs beside what is counted."""
    model, _, prompts, _ = subject
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        for decoder in (ours(subject), theirs(subject), theirs(subject, Reference.prompt_lookup)):
            calls.clear()
            (answer,) = decoder(prompts[:1]).answers
            assert len(calls) == len(answer.accepted_lengths), decoder.method
    finally:
        hook.remove()
    assert not model._forward_pre_hooks  # ours are taken off again


def test_the_first_forward_is_the_prefill(subject, monkeypatch):
    """With a clock that counts: ticks from the start to the first forward's tokens, and to the end."""
    ticks = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(ticks))
    for decoder in (ours(subject), ours(subject, 2), theirs(subject), theirs(subject, Reference.prompt_lookup)):
        timed = decoder(subject[2][: decoder.batch_size])
        assert timed.prefill_seconds == 1 and timed.seconds in (2, 3), decoder.method  # prompt lookup looks at the clock twice
    once = theirs(subject)
    once._settings["max_new_tokens"] = 1
    timed = once(subject[2][:1])
    assert (timed.prefill_seconds, timed.seconds) == (1, 1)  # one forward: nothing is left to decode


def test_prompt_lookup_takes_one_prompt(subject):
    with pytest.raises(AssertionError, match="one prompt"):
        theirs(subject, Reference.prompt_lookup, batch_size=2)


def test_one_forward_for_all_prompts_where_it_can_be_kept(subject, monkeypatch):
    model, rules, prompts, answers = subject
    assert StaticForwards(model, capacity=200).of(DecodingConfig(block_size=4)) is None  # a growing cache holds one text
    monkeypatch.setattr(
        module, "forward_for", lambda model, config, capacity: StaticForward(model, capacity=capacity, widths=module.widths_for(config))
    )
    kept = StaticForwards(model, capacity=max(len(p.input_ids) for p in prompts) + TOKENS)
    settings = [DecodingConfig(method=m, block_size=4, max_new_tokens=TOKENS) for m in ("jacobi", "running_window", "mr")]
    jacobi, running, mr = (kept.of(s) for s in settings)
    assert jacobi is running and mr is not jacobi  # of the same widths
    for s in settings:
        decoder = OurDecoder(model, rules, s, forwards=kept)
        assert [decoder([p]).answers[0].tokens for p in prompts] == answers


class Silent:
    method = "ar"

    def __init__(self, name, batch_size=1):
        self.block_size, self.batch_size = name, batch_size

    def __call__(self, prompts):
        return Timed([Answer([1], "eos", [1]) for _ in prompts], 1.0, 1.0)


def test_nobody_always_goes_first():
    decoders = [Silent(1), Silent(2), Silent(3), Silent(4, batch_size=2), Silent(5, batch_size=2)]
    turns = [(first, list(group), d.block_size) for first, group, d, _ in take_turns(decoders, ["a", "b", "c"], start=6)]
    assert turns == [
        *[(6, ["a"], 1), (6, ["a"], 2), (6, ["a"], 3), (7, ["b"], 2), (7, ["b"], 3), (7, ["b"], 1), (8, ["c"], 3), (8, ["c"], 1), (8, ["c"], 2)],
        *[(6, ["a", "b"], 5), (6, ["a", "b"], 4), (8, ["c"], 4), (8, ["c"], 5)],
    ]


def test_parts_hold_whole_batches():
    assert part_prompts(EvaluateConfig(batch_sizes=[1], speed_part=5)) == 5
    assert part_prompts(EvaluateConfig(batch_sizes=[1, 4, 6], speed_part=13)) == 24


def test_variants_are_settings_of_their_own():
    wide = DecodingConfig(method="mr", block_size=64, max_blocks=3, ngram=True)
    config = EvaluateConfig(methods=["mr"], block_sizes=[64], variants=[wide], max_new_tokens=40, seed=5)
    found = config.settings()
    assert [method_name(s) for s in found] == ["ar", "mr", "mr (K=3, ngram)"]
    assert found[-1] == replace(wide, max_new_tokens=40, seed=5)  # what all rows share
    with pytest.raises(ValueError, match="variants repeat what is measured already: mr at block 64"):
        EvaluateConfig(methods=["mr"], block_sizes=[64], variants=[DecodingConfig(method="mr", block_size=64)])
    with pytest.raises(ValueError, match="variants share max_new_tokens with all rows"):
        EvaluateConfig(variants=[replace(wide, max_new_tokens=9)])


def test_a_loop_is_degenerate():
    assert is_degenerate([7, 8, *[1, 2, 3] * 6], loop_tokens=16)
    assert not is_degenerate([7, 8, *[1, 2, 3] * 5], loop_tokens=16)  # 15 tokens
    assert not is_degenerate(torch.arange(100).tolist(), loop_tokens=16)
    long = list(range(100, 300))
    assert is_degenerate([*long, *[1, 2, 3] * 22], loop_tokens=64) and not is_degenerate([*long, *[1, 2, 3] * 21], loop_tokens=64)
    assert is_degenerate([*long[:20], *[1] * 20], loop_tokens=64)  # half of a short answer
    assert not is_degenerate([*long[:21], *[1] * 19], loop_tokens=64)
    assert not is_degenerate([1] * 15, loop_tokens=64) and is_degenerate([1] * 16, loop_tokens=64)  # too short to tell
    assert not is_degenerate([*range(10)] * 2, loop_tokens=64)  # twice is no loop
