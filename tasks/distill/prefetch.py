"""Rows of the next step are read while this one computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """load(step) of the next step runs in a thread of its own. The position is the step asked for: nothing else is remembered."""

    def __init__(self, load: Callable[[int], T], *, stop: int) -> None:
        """stop: the step after the last one; nothing is loaded from there on."""
        self._load, self._stop = load, stop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: tuple[int, Future[T]] | None = None
        self.waited = 0.0  # seconds that callers have waited for data

    def __call__(self, step: int) -> T:
        """What load(step) returns or raises."""
        started = time.monotonic()
        ready = self._next[1] if self._next and self._next[0] == step else self._thread.submit(self._load, step)
        try:
            loaded = ready.result()
        finally:
            self.waited += time.monotonic() - started
        self._next = (step + 1, self._thread.submit(self._load, step + 1)) if step + 1 < self._stop else None
        return loaded

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
