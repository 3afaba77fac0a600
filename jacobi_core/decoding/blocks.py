"""How far ahead one text drafts: the block scheduler (algorithm sections 1 and 6). Host arithmetic only."""

from __future__ import annotations

from jacobi_core.decoding.config import DecodingConfig, Method


class Horizon:
    """Up to which answer index tokens are in flight. The block with the first uncommitted token is real-active, those after it are
    pseudo-active: refreshed like any draft, but committed only when acceptance reaches them."""

    def __init__(self, config: DecodingConfig) -> None:
        self._n, self._max_blocks, self._spawn_ratio = config.block_size, config.max_blocks, config.spawn_ratio
        self._running = config.method in (Method.ar, Method.running_window, Method.recycling)
        self._spawns = config.method in (Method.multi_block, Method.mr)
        self._end = 0

    def end(self, done: int) -> int:
        """End of the tokens in flight for the next forward, with `done` tokens committed."""
        if self._running:
            return done + self._n
        self._end = max(self._end, (done // self._n + 1) * self._n)
        return self._end

    @property
    def newest(self) -> int:
        """Answer index where the newest block in flight begins."""
        return self._end - self._n

    def observe(self, done: int, accepted: int) -> None:
        """`accepted`: leading tokens of the newest block that are committed or agree with their predictions (pseudo-accepted).

        A new block starts once they are spawn_ratio of the block and fewer than max_blocks are in flight.
        """
        in_flight = (self._end - done // self._n * self._n) // self._n
        if self._spawns and in_flight < self._max_blocks and accepted >= self._spawn_ratio * self._n:
            self._end += self._n
