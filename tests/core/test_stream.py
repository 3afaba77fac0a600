"""Streams: the pieces together are the final text, whatever the tokenizer and wherever the forwards cut; no piece ends inside a character."""

from __future__ import annotations

from functools import cache
from itertools import chain

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaTokenizer, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import TextIteratorStreamer

import jacobi_core
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.stream import TextPieces, stream
from jacobi_core.decoding.tokens import TokenRules
from tests.core.tiny import random_prompts, tiny_model

SPECIALS = ["<|end|>", "<|tool|>"]
CORPUS = ["the cat sat on the mat", "def f(x):\n    return x", "日本語の文字列", "naïve café", "👩‍👩‍👧‍👦 🙂 🙃"]
FRAGMENTS = [
    "👩‍👩‍👧‍👦",
    "🙂",
    "🇩🇪",
    "日本語",
    "한글",
    "e\u0301",
    "é",
    "naïve",
    " the cat",
    "  ",
    " ",
    "\n",
    "\t",
    "def f(x):",
    "\ufffd",
    "a\u200db",
    *SPECIALS,
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As Qwen's and SmolLM's: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIALS[0], extra_special_tokens=SPECIALS[1:])
    found.add_tokens(["<think>"])  # an added token that is shown
    return found


@cache
def llama() -> LlamaTokenizer:
    """As Llama 2's: drops the first space, and spells unknown characters in bytes that are decoded run by run."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefhinorst\n", "日", "\ufffd"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "t"), ("▁", "▁")]
    tokens += ["".join(pair) for pair in merges]
    tokenizer = LlamaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIALS})
    return tokenizer


TOKENIZERS = {"byte_level": byte_level, "llama": llama}


def final(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """In blocks of these sizes, over and over."""
    blocks, at = [], 0
    while at < len(ids):
        size = sizes[len(blocks) % len(sizes)]
        blocks.append(ids[at : at + size])
        at += size
    return blocks


def check_pieces(tokenizer, blocks: list[list[int]]) -> None:
    pieces, given_out, seen = TextPieces(tokenizer), "", []
    for block in blocks:
        given_out += pieces.push(block)
        seen += block
        assert final(tokenizer, seen).startswith(given_out)
        if tokenizer is byte_level():
            assert given_out == final(tokenizer, seen).removesuffix("\ufffd")  # what is complete is not held back
    assert given_out + pieces.end() == final(tokenizer, seen)
    assert "".join(TextPieces(tokenizer).of(iter(blocks))) == final(tokenizer, seen)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5))
@example(text="the<|tool|> the cat", sizes=[1])
@example(text="👩‍👩‍👧‍👦" * 3, sizes=[1])
@example(text="  the", sizes=[1])
def test_pieces_of_a_text_are_the_text(name, text, sizes):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    check_pieces(tokenizer, cut(ids, sizes))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens_are_their_text(name, data):
    """What an untrained model writes: broken characters everywhere, special tokens inside them, ids that no token has."""
    tokenizer = TOKENIZERS[name]()
    of_bytes = tokenizer.convert_tokens_to_ids([f"<0x{b:02X}>" for b in (0x41, 0x80, 0xE5, 0x8F, 0xAB, 0xF0, 0x9F)]) if name == "llama" else []
    any_id = st.integers(0, len(tokenizer) + 2) | st.sampled_from([*of_bytes, *tokenizer.convert_tokens_to_ids(SPECIALS)])
    ids = data.draw(st.lists(any_id, max_size=30))
    check_pieces(tokenizer, cut(ids, data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))))


@pytest.mark.parametrize(
    "text", ["the cat sat " * 300, "👩‍👩‍👧‍👦" * 100, "👩‍" * 400, "\ufffd" * 400, ""], ids=["words", "emoji", "open emoji", "signs", "broken"]
)
def test_decoding_work_grows_with_the_text(text, monkeypatch):
    tokenizer = byte_level()
    ids = tokenizer.encode(text) or tokenizer.convert_tokens_to_ids(["Ģ"]) * 1000  # byte 0x80 alone, again and again
    decoded = []
    pieces = TextPieces(tokenizer)
    decode = pieces._decode
    monkeypatch.setattr(pieces, "_decode", lambda part: decoded.append(len(part)) or decode(part))
    assert "".join(pieces.of([i] for i in ids)) == final(tokenizer, ids)
    assert sum(decoded) < 6 * len(ids)


class Says(LogitsProcessor):
    """Makes a model answer this, whatever it thinks."""

    def __init__(self, prompt: list[int], answer: list[int]) -> None:
        self.start, self.answer = len(prompt), answer

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.answer[min(input_ids.shape[1] - self.start, len(self.answer) - 1)]] = 0.0
        return forced


@cache
def model_for(tokenizer):
    return tiny_model(vocab_size=len(tokenizer) + 16, eos_token_id=tokenizer.eos_token_id, pad_token_id=None, max_position_embeddings=4096)


PROMPT = [5, 6, 7]
ANSWER = "the 👩‍👩‍👧‍👦 naïve cat<|tool|> said: 日本語\nand then STOP here"


def saying(tokenizer, answer: str, *, stop: str | None = None) -> dict:
    ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    found = {"processors": LogitsProcessorList([Says(PROMPT, ids)])}
    if stop:
        found["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, stop)])
    return found


CONFIGS = [
    DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=128),
    DecodingConfig(method=Method.jacobi, block_size=5, max_new_tokens=128),
    DecodingConfig(method=Method.mr, block_size=16, max_new_tokens=128, ngram=True),
    DecodingConfig(method=Method.mr, block_size=8, max_new_tokens=9),  # the cap cuts inside a character
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("stop", [None, "STOP", "hen STOP h"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.method.value}-{c.max_new_tokens}")
def test_a_stream_is_the_generation_bit_by_bit(name, stop, config):
    tokenizer = TOKENIZERS[name]()
    model, more = model_for(tokenizer), saying(tokenizer, ANSWER, stop=stop)
    rules = TokenRules.of(model, tokenizer)
    whole = generate(model, torch.tensor(PROMPT), config, rules=rules, **more)
    text = final(tokenizer, whole.new_tokens.tolist())
    assert whole.stats.stop_reason == ("length" if config.max_new_tokens == 9 else "criteria" if stop else "eos")
    if stop and config.max_new_tokens > 9:
        assert stop in text and len(text) < len(ANSWER)

    texts = stream(model, torch.tensor([PROMPT]), config, tokenizer=tokenizer, **more)
    pieces = list(texts)
    assert "".join(pieces) == text and "" not in pieces
    ids = stream(model, torch.tensor(PROMPT), config, rules=rules, **more)
    blocks = list(ids)
    assert [len(block) for block in blocks] == whole.stats.committed_per_forward
    assert [*chain(*blocks)] == whole.new_tokens.tolist()
    if stop == "hen STOP h" and config.method in (Method.ar, Method.jacobi):
        assert stop not in final(tokenizer, blocks[-1])  # it lies across forwards
    for ended in (texts, ids):
        assert ended.generation.new_tokens.tolist() == whole.new_tokens.tolist()
        assert ended.generation.stats == whole.stats

    printed = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=1)
    generate(model, torch.tensor(PROMPT), config, rules=rules, streamer=printed, **more)
    assert "".join(printed) == text


def test_a_forward_may_complete_many_characters_at_once():
    tokenizer = byte_level()
    config = DecodingConfig(method=Method.mr, block_size=16, max_new_tokens=256, ngram=True)
    found = stream(model_for(tokenizer), torch.tensor(PROMPT), config, tokenizer=tokenizer, **saying(tokenizer, "🙂 the cat " * 12))
    assert "".join(found) == "🙂 the cat " * 12
    assert found.generation.stats.tpf > 2


def test_a_stream_can_be_left_early():
    model = tiny_model(seed=3)
    config = DecodingConfig(method=Method.jacobi, block_size=8, max_new_tokens=40)
    prompt = torch.tensor(random_prompts(1, seed=1, shortest=3)[0])
    found = stream(model, prompt, config, rules=TokenRules.of(model))
    blocks = []
    for block in found:
        assert not torch.is_inference_mode_enabled()  # the loop's mode does not reach its user
        blocks.append(block)
        if len(blocks) == 2:
            break
    first = [*chain(*blocks)]
    assert found.generation.new_tokens.tolist() == first
    assert found.generation.stats.stop_reason == ""
    whole = generate(model, prompt, config).new_tokens.tolist()
    assert [*first, *chain(*found)] == whole  # and gone on with
    assert next(found, None) is None
    del found
    assert generate(model, prompt, config).new_tokens.tolist() == whole


def test_mistakes_are_raised_at_once():
    model, config = tiny_model(seed=3), DecodingConfig(max_new_tokens=4)
    with pytest.raises(ValueError, match="at least one token"):
        jacobi_core.stream(model, torch.zeros(0, dtype=torch.long), config)
    with pytest.raises(ValueError, match="one prompt"):
        jacobi_core.stream(model, torch.zeros(2, 3, dtype=torch.long), config)


def test_the_tokenizers_end_of_text_ends_a_stream():
    tokenizer = byte_level()
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=None, pad_token_id=None)
    config = DecodingConfig(method=Method.jacobi, block_size=8, max_new_tokens=60)
    found = stream(model, torch.tensor(PROMPT), config, tokenizer=tokenizer, **saying(tokenizer, "the cat"))
    assert "".join(found) == "the cat"
    assert found.generation.stats.stop_reason == "eos"
