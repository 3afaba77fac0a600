"""Drafts beside the refreshed one: n-grams of rejected drafts (paper section 3.2), and copies from the text itself.

Whatever they propose is verified; they can change the number of forwards, never the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

LONGEST, SHORTEST = 6, 2  # tokens that must match for a copy; longer matches are tried first
PLACES = 4  # latest occurrences remembered per n-gram, and first ones looked at per rejected draft


class RejectedPool:
    """The latest rejected drafts; a candidate is what followed the last committed token in one of them."""

    def __init__(self, size: int) -> None:
        self._drafts: deque[Sequence[int]] = deque(maxlen=size)

    def add(self, rejected: Sequence[int]) -> None:
        """Tokens of a draft that were not accepted, in order."""
        if len(rejected) > 1:
            self._drafts.append(rejected)

    def continuations(self, last: int) -> Iterator[Sequence[int]]:
        """Newest first."""
        for draft in reversed(self._drafts):
            start = -1
            for _ in range(PLACES):  # a draft that repeats one token has it everywhere
                if last not in draft[start + 1 : -1]:
                    break
                start = draft.index(last, start + 1)
                yield draft[start + 1 :]


class NgramIndex:
    """Where every n-gram of the text so far ended; a candidate is what followed the longest earlier match of its last tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text: list[int] = []
        self._places: list[dict[tuple[int, ...], deque[int]]] = [{} for _ in range(LONGEST + 1)]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Committed tokens. An n-gram is indexed once the token after it is known, so the text's end never matches itself."""
        text = self._text
        for token in tokens:
            for n in range(SHORTEST, min(LONGEST, len(text)) + 1):
                self._places[n].setdefault(tuple(text[-n:]), deque(maxlen=PLACES)).append(len(text))
            text.append(token)

    def continuations(self, length: int) -> Iterator[Sequence[int]]:
        """Up to `length` tokens each; longest match first, then the latest."""
        for n in range(min(LONGEST, len(self._text)), SHORTEST - 1, -1):
            for place in reversed(self._places[n].get(tuple(self._text[-n:]), ())):
                yield self._text[place : place + length]
