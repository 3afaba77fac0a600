"""The text of an answer while it is decoded, cut at the first stop string. Holds back only what may still turn out to be part of one."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jacobi_core.decoding.stream import TextPieces


class AnswerText:
    """What a row's `stops` are, and at the same time its text: told every token but an EOS, once and in order.

    A stop string and what follows it are no part of the text; the token that completes it is the answer's last. Empty stop strings are ignored.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._pieces, self._stops = TextPieces(tokenizer), [s for s in stops if s]
        self._longest = max(map(len, self._stops), default=0)
        self._text = ""  # not given out yet
        self.stopped = False

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Index of the token at which the text ends."""
        if not self._stops:
            self._text += self._pieces.push(tokens)
            return None
        for i, token in enumerate(tokens):
            if (piece := self._pieces.push([token])) and self._add(piece):
                return i
        return None

    def take(self) -> str:
        """The text that is certain and was not given out before."""
        held = 0 if self.stopped else max((self._begins(stop) for stop in self._stops), default=0)
        found, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        return found

    def end(self) -> str:
        """The rest, once no token follows."""
        if not self.stopped:
            self._add(self._pieces.end())
        found, self._text = self._text, ""
        return found

    def _add(self, piece: str) -> bool:
        start = max(len(self._text) - self._longest + 1, 0)
        self._text += piece
        places = [at for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
        if places:
            self._text, self.stopped = self._text[: min(places)], True
        return self.stopped

    def _begins(self, stop: str) -> int:
        """Characters at the end of the text that this stop string begins with."""
        return next((n for n in range(min(len(stop) - 1, len(self._text)), 0, -1) if self._text.endswith(stop[:n])), 0)
