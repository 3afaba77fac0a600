"""A text while it is decoded: an iterator over what every forward commits, as token ids or as text. No threads.

Holds text back only where later tokens could still change it. Printing, and what a forward commits, are not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.forwards import Forward, forward_for
from jacobi_core.decoding.generate import Row, one_prompt, run_forwards
from jacobi_core.decoding.stats import Generation
from jacobi_core.decoding.tokens import TokenRules

UNFINISHED = "\ufffd"  # what a tokenizer shows for the bytes of a character that is not complete (or not valid)
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # how sentencepiece names the tokens that are one byte of a character


def stream(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: DecodingConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    rules: TokenRules | None = None,
    prompt_id: int = 0,
    processors: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
) -> Stream:
    """`generate`, handed over while it runs: `for piece in stream(...)`; each step of the loop is one forward, and leaving it early is fine.

    With a tokenizer the pieces are texts (see `TextPieces`; a forward that completes no character gives none), without one each is the
    list of token ids that a forward committed. rules: by default read off model and tokenizer. Else, and for the errors, as `generate`.
    """
    row = Row.make(model, one_prompt(input_ids), config, rules or TokenRules.of(model, tokenizer), prompt_id, processors, stopping_criteria)
    return Stream(forward_for(model, config, row.capacity), row, tokenizer)


class Stream(Iterator[str | list[int]]):
    """What `stream` returns. `generation`: the tokens and statistics so far, after the last piece those of the whole text."""

    def __init__(self, forward: Forward, row: Row, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._row = row
        committed = self._committed(forward)
        self._pieces = committed if tokenizer is None else TextPieces(tokenizer).of(committed)

    @property
    def generation(self) -> Generation:
        return self._row.generation

    def __next__(self) -> str | list[int]:
        return next(self._pieces)

    def _committed(self, forward: Forward) -> Iterator[list[int]]:
        done = 0
        for _ in run_forwards(forward, [self._row]):
            new = self._row.text.answer[done:]
            done += len(new)
            yield new


class TextPieces:
    """Text of tokens that arrive bit by bit: the pieces together are `tokenizer.decode(all of them, skip_special_tokens=True)`.

    No piece ends inside a character, and no complete one is held back (but by sentencepiece's single bytes, until a token follows them).
    Decodes only the last piece's tokens and what came after them. Those are read again since a tokenizer may treat the start of a text
    differently (Llama's drops a space there). Where they begin inside a character its other bytes are signs of their own, counted as shown.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ids: list[int] = []  # tokens of the last piece, then those whose text is still held back
        self._old = 0  # how many of them are the last piece's
        self._shown = 0  # characters of their text that need not be given out any more
        self._closed = 0  # tokens before a run of single bytes (sentencepiece decodes such a run as a whole: it has to end first)

    def of(self, committed: Iterator[Sequence[int]]) -> Iterator[str]:
        """The pieces of all that is committed, none of them empty."""
        for tokens in committed:
            if piece := self.push(tokens):
                yield piece
        if rest := self.end():
            yield rest

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete, perhaps none."""
        for token in tokens:
            name = self._tokenizer.convert_ids_to_tokens(token)
            if token in self._special or name is None:  # shows nothing (the second: a row of the embedding that is no token's)
                continue
            self._ids.append(token)
            if not _BYTE.fullmatch(name):
                self._closed = len(self._ids)
        text = self._decode(self._ids[: self._closed])
        held = int(text.endswith(UNFINISHED))
        piece = text[self._shown : len(text) - held]
        if piece:  # and so the sign that is held back, if any, is of tokens that came after the last piece's
            self._ids, self._closed = self._ids[self._old :], self._closed - self._old
            self._old = self._closed
            self._shown = len(self._decode(self._ids[: self._old])) - held
        return piece

    def end(self) -> str:
        """The text held back at the end, an unfinished character's sign included."""
        return self._decode(self._ids)[self._shown :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
