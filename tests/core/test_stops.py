"""Where a text ends: EOS at every offset of a block and in every role, stop strings, criteria, caps. Nothing after the end counts.

What a draft says is dictated here, so that EOS sits exactly where a test wants it.
"""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.drafts import ContextDrafts
from jacobi_core.decoding.generate import generate, generate_batch
from jacobi_core.decoding.text import DRAFT, NGRAM, RECYCLED
from jacobi_core.decoding.tokens import TokenRules
from tests.core.tiny import VOCABULARY, random_prompts, tiny_model

N = 5  # block size
PARALLEL = [m for m in Method if m is not Method.ar]
MODEL = tiny_model("qwen3", seed=1)


def rules_with(*eos: int) -> TokenRules:
    return TokenRules(eos_ids=frozenset(eos), vocabulary_size=VOCABULARY, special_ids=frozenset())


def ar(prompt, cap, rules, model=MODEL, **more):
    config = DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=cap)
    return generate(model, torch.tensor(prompt), config, rules=rules, **more).new_tokens.tolist()


def distinct_text(length: int) -> tuple[list[int], list[int]]:
    """A prompt and its greedy answer whose first `length` tokens differ from each other and from the prompt's last: a token tells its place."""
    for prompt in random_prompts(200, seed=0):
        answer = ar(prompt, length + N, rules_with())
        if len({prompt[-1], *answer[:length]}) == length + 1:
            return prompt, answer
    raise AssertionError("no such prompt")


PROMPT, ANSWER = distinct_text(2 * N + 2)
PLACE = {token: i + 1 for i, token in enumerate(ANSWER[: 2 * N + 2])} | {PROMPT[-1]: 0}  # last token -> answer index after it


def dictated(start: int, count: int, good: int) -> list[int]:
    """`good` right tokens from answer index `start`, then wrong ones."""
    right = ANSWER[start : start + count]
    return [t if i < good else (t + 1) % VOCABULARY for i, t in enumerate(right)] + [0] * (count - len(right))


class DictatedPool:
    """In place of RejectedPool: one candidate, right up to `good` tokens."""

    good = 0

    def __init__(self, size):
        pass

    def add(self, rejected):
        pass

    def continuations(self, last):
        return iter([dictated(PLACE[last], 4 * N, self.good)])


class DictatedIndex(DictatedPool):
    """In place of NgramIndex."""

    def __init__(self, tokens):
        self._last = tokens[-1]

    def extend(self, tokens):
        self._last = tokens[-1]

    def continuations(self, length):
        return iter([dictated(PLACE[self._last], length, self.good)])


@pytest.fixture
def forwards(monkeypatch):
    """Counts what really ran: forwards of the model, and roll-backs of its cache, in order."""
    ran, call, rollback = [], CachedForward.__call__, CachedForward.rollback

    def counted(self, *args, **kwargs):
        ran.append("forward")
        return call(self, *args, **kwargs)

    def counted_rollback(self, length):
        ran.append("rollback")
        return rollback(self, length)

    monkeypatch.setattr(CachedForward, "__call__", counted)
    monkeypatch.setattr(CachedForward, "rollback", counted_rollback)
    return ran


def assert_ends(found, eos_at, ran, reason="eos"):
    """At answer index `eos_at`: nothing after it is returned or counted, and the forward that said it is the last thing that ran."""
    stats = found.stats
    assert found.new_tokens.tolist() == ANSWER[: eos_at + 1]
    assert stats.stop_reason == reason
    assert stats.tokens == sum(stats.committed_per_forward) == sum(stats.accepted_from.values()) == eos_at + 1
    assert stats.forwards == ran.count("forward")
    assert ran[-1] == "forward"  # the last forward's cache is not touched again


BLOCKS = [(m, k) for m in PARALLEL for k in ((1, 2, 3) if m in (Method.multi_block, Method.mr) else (1,))]
ROLES = [(DRAFT, good) for good in range(N)] + [(source, good) for source in (RECYCLED, NGRAM) for good in range(1, N)]
CASES = [(*role, *block) for role in ROLES for block in BLOCKS if role[0] != RECYCLED or block[0] in (Method.recycling, Method.mr)]


@pytest.mark.parametrize(("source", "good", "method", "max_blocks"), CASES)
def test_eos_at_every_offset_in_every_role(source, good, method, max_blocks, monkeypatch, forwards):
    """Every proposal of `source` holds `good` right tokens: an EOS before that index is drafted, one at it is the bonus token."""
    monkeypatch.setattr(
        ContextDrafts, "draw", lambda self, start, count, stream: torch.tensor(dictated(start, count, good if source == DRAFT else 0))
    )
    for name, stand_in, provides in (("RejectedPool", DictatedPool, RECYCLED), ("NgramIndex", DictatedIndex, NGRAM)):
        monkeypatch.setattr(f"jacobi_core.decoding.text.{name}", type(name, (stand_in,), {"good": good if source == provides else 0}))
    config = DecodingConfig(
        method=method, block_size=N, max_blocks=max_blocks, spawn_ratio=0.2, max_new_tokens=2 * N + 4, ngram=source == NGRAM, verification_size=2
    )
    for offset in range(2 * N + 1):
        forwards.clear()
        eos = ANSWER[offset : offset + 1 + (offset + good) % 2]  # one id, or a second one that would come right after
        found = generate(MODEL, torch.tensor(PROMPT), config, rules=rules_with(*eos))
        assert_ends(found, offset, forwards)
        if offset <= good:  # within the first proposal, or the prediction after its right tokens
            assert found.stats.forwards == 1
            assert dict(found.stats.accepted_from) == {source: offset + 1}


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("max_blocks", [1, 3])
def test_criteria_are_asked_for_every_token_in_turn_and_end_the_text_there(method, max_blocks, forwards):
    n = 1 if method is Method.ar else N
    config = DecodingConfig(method=method, block_size=n, max_blocks=max_blocks, spawn_ratio=0.2, max_new_tokens=2 * N + 2, ngram=n > 1)
    for end in range(1, 2 * N + 1):
        asked = []

        class AtLength(StoppingCriteria):
            def __call__(self, input_ids, scores, *, asked=asked, end=end, **kwargs):
                asked.append(input_ids[0].tolist())
                return torch.tensor([input_ids.shape[1] == len(PROMPT) + end])

        forwards.clear()
        found = generate(MODEL, torch.tensor(PROMPT), config, rules=rules_with(), stopping_criteria=StoppingCriteriaList([AtLength()]))
        assert_ends(found, end - 1, forwards, reason="criteria")
        assert asked == [PROMPT + ANSWER[: i + 1] for i in range(end)]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("method", list(Method))
def test_caps_from_1_to_two_blocks(method, sampled):
    """The text under a cap is the longer text, cut; alone and in a batch of rows that end at different forwards."""
    n = 1 if method is Method.ar else N
    prompts = [PROMPT, [9, 9, 9, 9], [7, 8]]
    knobs = dict(method=method, block_size=n, max_blocks=3, spawn_ratio=0.2, ngram=n > 1, temperature=0.8 if sampled else 0.0)
    longest = [
        generate(MODEL, torch.tensor(p), DecodingConfig(max_new_tokens=2 * N, **knobs), rules=rules_with(), prompt_id=i).new_tokens.tolist()
        for i, p in enumerate(prompts)
    ]
    for cap in range(1, 2 * N + 1):
        config = DecodingConfig(max_new_tokens=cap, **knobs)
        alone = [generate(MODEL, torch.tensor(p), config, rules=rules_with(), prompt_id=i) for i, p in enumerate(prompts)]
        for found in (alone, generate_batch(MODEL, prompts, config, rules=rules_with())):
            assert [g.new_tokens.tolist() for g in found] == [text[:cap] for text in longest]
            assert {g.stats.stop_reason for g in found} == {"length"}
            assert [g.stats.tokens for g in found] == [cap] * 3


@pytest.mark.parametrize("form", [None, int, list, tuple, set, torch.tensor])
def test_eos_ids_in_every_form_end_the_text(form):
    """None: the text goes to its cap (users' report E2)."""
    model = tiny_model("qwen3", seed=1, eos_token_id=None)
    assert model.generation_config.eos_token_id is None
    ids = [ANSWER[7], ANSWER[3]]
    given = None if form is None else ids[1] if form is int else form(ids)
    rules = TokenRules.of(model, eos_ids=given)
    for method in PARALLEL:
        found = generate(model, torch.tensor(PROMPT), DecodingConfig(method=method, block_size=N, max_new_tokens=10), rules=rules)
        assert found.new_tokens.tolist() == (ANSWER[:10] if form is None else ANSWER[:4])
        assert found.stats.stop_reason == ("length" if form is None else "eos")


def byte_level_tokenizer(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """All 256 bytes, `merges` on top, and an EOS."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    bpe = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


class Script(LogitsProcessor):
    """Makes a model say `tokens` after a prompt of `start` tokens: its favourite token, whatever it was, is moved there."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        self.start, self.tokens = start, tokens

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.tokens[input_ids.shape[1] - self.start]] = scores.max() + 1
        return scores


TOKENIZER = byte_level_tokenizer([("N", "D"), ("ND", "!"), ("a", "b")])  # `ND!` is one token: a stop string END stops in the middle of it
SPEAKER = tiny_model("llama", seed=1, vocab_size=len(TOKENIZER), dtype=torch.float32)


@pytest.mark.parametrize("method", PARALLEL)
@pytest.mark.parametrize(("stop", "text"), [("END", "ab 1END!more, END"), ("END", "abENDab"), ("🙂é", "ab🙂 é🙂éab"), ("\n\n", "ab\n ab\n\n\nab")])
def test_a_stop_string_across_blocks_ends_where_transformers_ends(method, stop, text):
    """Every alignment of the string to the blocks; the witness is transformers' own loop with the same script."""
    for shift in range(N):
        script = TOKENIZER.encode("x" * shift + text + "." * 2 * N)
        prompt = torch.tensor([TOKENIZER.encode("ab END")])  # a stop string in the prompt is not the answer's
        processors = LogitsProcessorList([Script(prompt.shape[1], script)])
        theirs = SPEAKER.generate(
            prompt, do_sample=False, max_new_tokens=2 * N + 18, logits_processor=processors, stop_strings=[stop], tokenizer=TOKENIZER, eos_token_id=0
        )[0, prompt.shape[1] :].tolist()
        found = generate(
            SPEAKER,
            prompt,
            DecodingConfig(method=method, block_size=N, max_blocks=3, spawn_ratio=0.2, max_new_tokens=2 * N + 18, ngram=True),
            rules=TokenRules(eos_ids=frozenset(), vocabulary_size=len(TOKENIZER), special_ids=frozenset()),
            processors=processors,
            stopping_criteria=StoppingCriteriaList([StopStringCriteria(TOKENIZER, [stop])]),
        )
        assert found.new_tokens.tolist() == theirs == script[: len(theirs)]
        assert stop in TOKENIZER.decode(theirs)
        assert stop not in TOKENIZER.decode(theirs[:-1])
        assert found.stats.stop_reason == "criteria"
        assert found.stats.tokens == len(theirs) < len(script)


@pytest.mark.parametrize("rows", [1, 3])
def test_criteria_see_every_token_in_turn_and_no_text_is_copied_for_them(rows):
    """One growing buffer per text: a criterion costs what it looks at, not a copy of prompt and answer for every token."""

    class Watch(StoppingCriteria):
        def __init__(self):
            self.seen, self.places = {}, set()

        def __call__(self, input_ids, scores, **kwargs):
            text = input_ids[0].tolist()
            self.seen.setdefault(tuple(text[:4]), []).append(text)
            self.places.add(input_ids.data_ptr())
            return torch.zeros(1, dtype=torch.bool)

    watch, prompts = Watch(), [[i + 1, 5, 6, 7] for i in range(rows)]
    config = DecodingConfig(method=Method.mr, block_size=N, max_new_tokens=4 * N)
    criteria = StoppingCriteriaList([watch])
    found = generate_batch(MODEL, prompts, config, rules=rules_with(), stopping_criteria=criteria)
    assert len(watch.places) == rows
    for prompt, generation in zip(prompts, found, strict=True):
        answer = generation.new_tokens.tolist()
        assert watch.seen[tuple(prompt)] == [[*prompt, *answer[: i + 1]] for i in range(len(answer))]
