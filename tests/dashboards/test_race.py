"""Two decoders side by side say what each says alone, every token knows where it came from, and the clocks decide whose turn it is."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from dashboards import race as race_module
from dashboards.race import OWN, Decoder, ar_of, clock_html, encode, legend_html, load, race, text_html
from dashboards.stored import Unreadable
from jacobi_core import DecodingConfig, TokenRules, generate
from tests.dashboards.made_store import Made

CONFIG = DecodingConfig(method="mr", block_size=8, max_new_tokens=40, ngram=True)


@pytest.fixture(scope="module")
def loaded(made: Made):
    return load(made.stage("base"), dtype="float64")


def decoders(config: DecodingConfig = CONFIG) -> list[Decoder]:
    return [Decoder("AR", ar_of(config)), Decoder("mr", config)]


def test_each_says_what_it_says_alone_and_every_token_has_a_source(loaded):
    model, tokenizer = loaded
    ids, made = encode(tokenizer, "Write add_3(xs): add 3 to any number."), decoders()
    turns = [decoder.name for decoder in race(model, tokenizer, ids, made)]
    assert set(turns) == {"AR", "mr"}
    for decoder in made:
        alone = generate(model, torch.tensor(ids), decoder.config, rules=TokenRules.of(model, tokenizer))
        assert torch.equal(decoder.generation.new_tokens, alone.new_tokens)
        assert [count for count, _ in decoder.committed] == alone.stats.committed_per_forward
        assert "".join(token.text for token in decoder.tokens) == tokenizer.decode(alone.new_tokens, skip_special_tokens=True)
        assert [token.forward for token in decoder.tokens] == [i for i, (n, _) in enumerate(decoder.committed, start=1) for _ in range(n)]
        counts = {source: sum(n for n, of in decoder.committed if of == source) for source in alone.stats.accepted_from}
        assert counts == alone.stats.accepted_from
        assert sum(token.source == OWN for token in decoder.tokens) == len(decoder.committed) and decoder.tpf == alone.stats.tpf
    ar, parallel = made
    assert all(token.source == OWN for token in ar.tokens) and any(token.source != OWN for token in parallel.tokens)


def test_the_decoder_whose_clock_is_behind_goes_on(loaded, monkeypatch):
    """One whose forwards take three times as long gets a third of the turns."""
    clock = itertools.count()
    model, tokenizer = loaded
    made = decoders()
    slow = made[1]

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def perf_counter():
            return next(clock)

    monkeypatch.setattr(race_module, "time", Clock)
    turns = []
    for decoder in race(model, tokenizer, encode(tokenizer, "Write f."), made):
        turns.append(decoder.name)
        slow.seconds += 2 * (decoder is slow)  # each forward is one tick of the clock
        if any(d.generation is not None for d in made):
            break
    both = turns[: 4 * (len(turns) // 4)]
    assert abs(both.count("AR") - 3 * both.count("mr")) <= 3 and len(both) >= 8


def test_slower_is_shown_slower_and_no_clock_sees_it(loaded):
    model, tokenizer = loaded
    made, start = decoders(DecodingConfig(block_size=4, max_new_tokens=6)), time.perf_counter()
    for _ in race(model, tokenizer, encode(tokenizer, "Write f."), made, slower=20):
        pass
    shown = time.perf_counter() - start
    assert shown >= 20 * max(decoder.seconds for decoder in made) > 0


def test_marks_tell_how_a_token_was_accepted_and_text_is_escaped():
    decoder = Decoder("x", CONFIG, committed=[(2, "draft"), (1, "draft")])
    decoder.tokens = [race_module.Token("<b>", "draft", 1), race_module.Token("&", OWN, 1), race_module.Token("c", OWN, 2)]
    html = text_html(decoder)
    assert "&lt;b&gt;" in html and "<b>" not in html and html.count("forward 1: ") == 2
    assert html.index("&amp;") < html.index('aria-hidden="true">|') < html.index(">c<")
    assert "3 tokens" in clock_html(decoder) and "TPF 1.50" in clock_html(decoder) and "running" in clock_html(decoder)
    assert all(meaning in legend_html() for meaning in race_module.SOURCES.values())


@pytest.mark.parametrize(("spoil", "said"), [("gone", "is no checkpoint folder: it was deleted"), ("torn", "cannot be loaded")])
def test_a_model_that_is_not_there_any_more_is_a_sentence(copied: Made, spoil: str, said: str):
    folder = copied.stage("base")
    (folder / ("config.json" if spoil == "gone" else "model.safetensors")).unlink()
    with pytest.raises(Unreadable, match=said) as caught:
        load(folder, dtype="float32")
    assert "\n" not in str(caught.value)
