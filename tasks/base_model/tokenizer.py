"""A byte-level BPE tokenizer with a ChatML template, trained from text; the same for the same texts.

It splits words as Qwen2's does: transformers loads the tokenizer of any qwen2 checkpoint as that class, whatever its files say, and an
exported checkpoint must tokenize as the prompts were.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 512) -> Qwen2Tokenizer:
    """Learn `vocab_size` tokens (special ones and the 256 bytes included) from `texts`.

    Ids 0, 1, 2 are <|endoftext|> (padding), <|im_start|> and <|im_end|> (end of a turn, the tokenizer's eos). Little text gives fewer tokens.
    ValueError if `vocab_size` cannot hold the bytes and special tokens.
    """
    special = [END_OF_TEXT, TURN_START, TURN_END]
    if vocab_size < 256 + len(special):
        raise ValueError(f"vocab_size: {vocab_size} is too small, a byte-level vocabulary needs at least {256 + len(special)}")
    family = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = family.normalizer, family.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_with_roles(texts), trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        extra_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _with_roles(texts: Iterable[str]) -> Iterable[str]:
    """Every text as often as the roles around it, so that `user` and `assistant` do not cost a prompt a dozen tokens."""
    for text in texts:
        yield text
        yield "user\nassistant\n"
