"""From drafts in any order to drafts without duplicates, in an order that content and seed alone decide, cut into splits.

The order is that of a hash, so drafts are first spread over files by the hash's beginning and then sorted file by file: memory holds one
of them, however many drafts there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tasks.artifacts import prompt_id
from tasks.prepare_prompts.config import Draft, PromptSettings

BUCKETS = 64


class ArrangedDrafts:
    """Iterates over the drafts, test, then validation, then train; as often as wanted. total, duplicates: what was read, and left out."""

    def __init__(self, drafts: Iterable[Draft], settings: PromptSettings, scratch: Path) -> None:
        """Reads all drafts once; `scratch` is an empty folder that outlives this object."""
        self._cuts, self._files = _cuts(settings), [scratch / f"{i:02d}" for i in range(BUCKETS)]
        self.total = 0
        with ExitStack() as stack:
            files = [stack.enter_context(file.open("w", encoding="utf-8", newline="")) for file in self._files]
            for draft in drafts:
                self.total += 1
                digest = hashlib.sha256(f"{settings.seed}:{prompt_id(draft.messages)}".encode()).hexdigest()
                files[int(digest[:2], 16) * BUCKETS >> 8].write(f"{digest} {json.dumps([draft.messages, draft.meta])}\n")
        self.duplicates = self.total - sum(1 for _ in self._unique())

    def _unique(self) -> Iterator[Draft]:
        for file in self._files:
            with file.open(encoding="utf-8", newline="\n") as lines:
                ordered = sorted(lines)  # among duplicates the first by its meta, whichever was read first
            for _, same in groupby(ordered, key=lambda line: line[:64]):
                yield Draft(*json.loads(next(same)[65:]))

    def __iter__(self) -> Iterator[Draft]:
        drafts = self._unique()
        for split, count in self._cuts:
            taken = 0
            while taken != count and (draft := next(drafts, None)):
                taken += 1
                yield replace(draft, split=split)


class GivenDrafts:
    """Drafts that come with their split, in their own order, duplicates left out."""

    def __init__(self, drafts: Iterable[Draft]) -> None:
        unique: dict[int, Draft] = {}
        self.total = 0
        for draft in drafts:
            self.total += 1
            unique.setdefault(prompt_id(draft.messages), draft)
        self._drafts = list(unique.values())
        self.duplicates = self.total - len(self._drafts)

    def __iter__(self) -> Iterator[Draft]:
        return iter(self._drafts)


def _cuts(settings: PromptSettings) -> list[tuple[str, int]]:
    everything = -1  # a count that is never reached
    return [("test", settings.test), ("validation", settings.validation), ("train", everything if settings.train is None else settings.train)]
