"""The one way from messages to token ids, what identifies it, and how a prompt is made to fit."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from tasks.stage import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """The generation prompt included. Raises UserError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UserError("data.tokenizer: it has no chat template; add one to the checkpoint, prompts are never fed raw")
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the chat template's text (of all of them, as JSON, where a tokenizer has several)."""
    found = tokenizer.chat_template
    return hashlib.sha256((found if isinstance(found, str) else json.dumps(found, sort_keys=True)).encode()).hexdigest()


def truncate(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], limit: int) -> list[dict[str, str]] | None:
    """The messages with as much of the last one's beginning as fits into `limit` tokens; None where not one character does."""
    *before, last = messages

    def cut(length: int) -> list[dict[str, str]]:
        return [*before, {**last, "content": last["content"][:length]}]

    fits, too_long = 0, len(last["content"]) + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(template(tokenizer, cut(middle))) <= limit:
            fits = middle
        else:
            too_long = middle
    return cut(fits) if fits else None
