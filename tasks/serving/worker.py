"""The engine's thread: takes requests from the event loop between two forwards, and gives their texts back as they grow.

A reader is never waited for: what it has not taken yet is kept as text, at most one answer long, and its row is free when the answer ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.serving.asked import Order
from tasks.serving.metrics import Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jacobi_core.decoding.stats import DecodingStats
    from jacobi_core.serving.answer_text import AnswerText
    from jacobi_core.serving.engine import Engine, Event

log = logging.getLogger(__name__)
FAILED = "failed"  # the engine's word for it
FAILURES = 3  # forwards that fail one after the other before the replica counts as dead


@dataclass
class Piece:
    """What came since the last one. reason: as `engine.Event`'s, None while the answer goes on."""

    text: str
    reason: str | None
    stats: DecodingStats | None


@dataclass
class _Job:
    order: Order
    text: AnswerText
    arrived: float
    loop: asyncio.AbstractEventLoop
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    piece: Piece = field(default_factory=lambda: Piece("", None, None))
    id: int | None = None  # of the engine; None before it has it


class Worker:
    """Owns the engine. `start`, then `decode` from any event loop; `close` ends the thread and everything in flight with it."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, metrics: Metrics, *, token_bytes: int, stall_seconds: float) -> None:
        """tokenizer: this thread's own; two threads cannot share one. token_bytes: of the KV cache, for the gauges."""
        self._engine, self._tokenizer, self._metrics, self._token_bytes = engine, tokenizer, metrics, token_bytes
        self._stall_seconds = stall_seconds
        self._wake = threading.Condition()
        self._arrived: list[_Job] = []
        self._left: list[_Job] = []
        self._jobs: dict[int, _Job] = {}
        self._closed = False
        self._beat, self._failures = time.monotonic(), 0
        self._tokens = self._forwards = 0
        self.in_flight = 0  # requests that have not been answered: decoding and waiting
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.set("jacobi_kv_limit_bytes", engine.limits.kv_tokens * token_bytes)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def problem(self) -> str | None:
        """Why nothing can be expected of it any more, if so."""
        if not self._thread.is_alive():
            return "the engine's thread has ended"
        if self._failures >= FAILURES:
            return f"the last {self._failures} forwards have failed"
        waited = time.monotonic() - self._beat
        if self.in_flight and waited > self._stall_seconds:
            return f"no forward has finished for {waited:.0f} seconds"
        return None

    async def decode(self, order: Order) -> AsyncGenerator[Piece]:
        """The answer, piece by piece; leaving early frees its row. Raises ValueError, before the first piece, for what can never fit."""
        from jacobi_core.serving.answer_text import AnswerText

        self._engine.check(order.prompt, order.config)
        job = _Job(order, AnswerText(self._tokenizer, order.stops), time.monotonic(), asyncio.get_running_loop())
        self.in_flight += 1
        with self._wake:
            if self.in_flight == 1:
                self._beat = time.monotonic()
            self._arrived.append(job)
            self._wake.notify()
        outcome = "cancelled"
        try:
            first = True
            while True:
                await job.grown.wait()
                job.grown.clear()
                piece, job.piece = job.piece, Piece("", None, None)
                if first:
                    self._metrics.observe("jacobi_time_to_first_token_seconds", time.monotonic() - job.arrived)
                    first = False
                if piece.reason is not None:
                    outcome = {"eos": "stop", "criteria": "stop", "length": "length"}.get(piece.reason, "failed")
                    self._metrics.observe("jacobi_request_seconds", time.monotonic() - job.arrived)
                    yield piece
                    return
                yield piece
        finally:
            self.in_flight -= 1
            self._metrics.add("jacobi_requests_total", label=outcome)
            if outcome == "cancelled":
                with self._wake:
                    self._left.append(job)
                    self._wake.notify()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("the engine's thread ends here")
        with self._wake:
            cut_off = [*self._jobs.values(), *self._arrived]
        if cut_off:
            log.warning("%d requests in flight were cut off", len(cut_off))
        self._send([(job, Piece("", FAILED, None)) for job in cut_off])

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._arrived or self._left or self._jobs):
                    self._wake.wait()
                if self._closed:
                    return
                arrived, left, self._arrived, self._left = self._arrived, self._left, [], []
            gone = {id(job) for job in left}
            for job in arrived:
                if id(job) not in gone:
                    job.id = self._engine.submit(job.order.prompt, job.order.config, stops=job.text)
                    self._jobs[job.id] = job
                    self._metrics.add("jacobi_prompt_tokens_total", len(job.order.prompt))
            for job in left:
                if job.id is not None and self._jobs.pop(job.id, None):
                    self._engine.cancel(job.id)
            self._hand_out(self._engine.step())

    def _hand_out(self, events: list[Event]) -> None:
        from jacobi_core.decoding.generate import NOT_FINITE

        failed = any(event.reason == FAILED for event in events)
        self._failures = self._failures + 1 if failed else 0
        self._beat = time.monotonic()
        ready: list[tuple[_Job, Piece]] = []
        committed = 0
        for event in events:
            job = self._jobs[event.id]
            committed += len(event.tokens)
            if event.reason is not None:
                del self._jobs[event.id]
            text = job.text.end() if event.reason is not None else job.text.take()
            ready.append((job, Piece(text, event.reason, event.stats)))
        self._send(ready)
        self._count(events, committed, sum(event.reason == NOT_FINITE for event in events))

    def _send(self, ready: list[tuple[_Job, Piece]]) -> None:
        for loop in {job.loop for job, _ in ready}:
            try:
                loop.call_soon_threadsafe(_deliver, [(job, piece) for job, piece in ready if job.loop is loop])
            except RuntimeError:  # the loop has been closed, and with it all that waited there
                log.info("the event loop of some requests has gone")

    def _count(self, events: list[Event], committed: int, quarantined: int) -> None:
        m, engine = self._metrics, self._engine
        if events:
            m.add("jacobi_forwards_total")
            m.add("jacobi_text_forwards_total", len(events))
            m.add("jacobi_answer_tokens_total", committed)
            m.add("jacobi_quarantined_rows_total", quarantined)
            self._tokens, self._forwards = self._tokens + committed, self._forwards + len(events)
            m.set("jacobi_mean_acceptance_length", self._tokens / self._forwards - 1)
        m.set("jacobi_queue_requests", engine.waiting)
        m.set("jacobi_rows_in_flight", engine.running)
        m.set("jacobi_kv_reserved_bytes", engine.reserved * self._token_bytes)


def _deliver(pieces: list[tuple[_Job, Piece]]) -> None:
    """In the event loop: a piece that was not taken yet grows."""
    for job, piece in pieces:
        job.piece = Piece(job.piece.text + piece.text, piece.reason, piece.stats)
        job.grown.set()
