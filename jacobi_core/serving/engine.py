"""Continuous batching: texts join and leave between the forwards of one running batch. One thread's object; it knows no network and no clock.

Every answer is that of its run alone: what is decoded beside a text changes neither its tokens nor its samples, only (with auto drafts) how
many forwards it takes.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.batch import BatchForward
from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.forwards import batch_latency, held_in_batch
from jacobi_core.decoding.generate import NOT_FINITE, Row, check_context, step
from jacobi_core.decoding.latency import LatencyCurve
from jacobi_core.decoding.pace import Pace
from jacobi_core.decoding.stats import DecodingStats
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.serving.admission import Limits, Need

log = logging.getLogger(__name__)
FAILED = "failed"  # reason of a text that an error in the decoder has ended
WIDEST_MEASURED = 256  # tokens of all texts together: beyond them a latency curve goes on as a line
MOST_PACES = 64  # settings whose acceptance is remembered: requests choose them, so their number is theirs


@dataclass(frozen=True)
class Event:
    """What one iteration did for one text. reason: None while it goes on, else "eos", "length", "criteria" (its stops), NOT_FINITE or FAILED."""

    id: int
    tokens: Sequence[int]
    reason: str | None
    stats: DecodingStats | None
    began: bool = False  # this was its first forward


@dataclass
class _Job:
    id: int
    prompt: Sequence[int]
    config: DecodingConfig
    stops: Callable[[Sequence[int]], int | None] | None
    need: Need
    row: Row | None = None
    pace: Pace | None = None
    done: int = 0


class Engine:
    """`submit` and `cancel` between calls of `step`, which runs one forward for everybody in flight."""

    def __init__(self, model: PreTrainedModel, rules: TokenRules, limits: Limits) -> None:
        """Raises ValueError for a model that cannot be decoded in a batch (its cache, or an attention that takes no mask)."""
        self.model, self.rules, self.limits = model, rules, limits
        self._ids = itertools.count()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._cancelled: set[int] = set()
        self._forward = BatchForward(model)
        self._curves: dict[int, LatencyCurve] = {}  # by texts in a forward, a power of two
        self._paces: OrderedDict[tuple, Pace] = OrderedDict()
        self._vocabulary = model.get_input_embeddings().weight.shape[0]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def reserved(self) -> int:
        """Tokens that the KV buffers have room for now; never above limits.kv_tokens."""
        rows, columns = self._forward.reserved
        return rows * columns

    def warm_up(self, config: DecodingConfig) -> None:
        """Spend before the first request what is spent once: kernels, and latency curves where drafts are adaptive."""
        if config.auto:
            self._curve_of(self.limits.rows)
        self.submit([min(i for i in range(self._vocabulary) if i not in self.rules.eos_ids)], replace(config, max_new_tokens=2))
        while self._waiting or self._running:
            self.step()

    def check(self, prompt: Sequence[int], config: DecodingConfig) -> Need:
        """Raises ValueError for a text that could never be decoded here."""
        if not len(prompt):
            raise ValueError("a prompt needs at least one token")
        if not all(0 <= token < self._vocabulary for token in prompt):
            raise ValueError(f"a prompt's token ids must be between 0 and {self._vocabulary - 1}")
        check_context(self.model, len(prompt), config.max_new_tokens)
        need = Need.of(len(prompt), config)
        if not self.limits.fit([need]):
            raise ValueError(
                f"prompt ({need.prompt} tokens), answer (up to {config.max_new_tokens}) and drafts ({need.widest}) exceed "
                f"the {self.limits.kv_tokens} tokens of KV memory here; ask for a shorter answer"
            )
        return need

    def submit(self, prompt: Sequence[int], config: DecodingConfig, *, stops: Callable[[Sequence[int]], int | None] | None = None) -> int:
        """Queue a text; its id. stops: as for `Text`. Raises ValueError as `check`."""
        job = _Job(next(self._ids), prompt, config, stops, self.check(prompt, config))
        self._waiting.append(job)
        return job.id

    def cancel(self, job_id: int) -> None:
        """Its row is free from the next iteration on, and it gets no further event. Unknown and finished ids are ignored."""
        self._cancelled.add(job_id)

    def step(self) -> list[Event]:
        """One iteration: the cancelled leave, those who fit join, one forward over all. Never raises for a forward that fails: its texts end."""
        self._drop_cancelled()
        try:
            began = self._admit()
            if not self._running:
                return []
            for job in self._running:
                if job.pace is not None:
                    job.pace.rows, job.pace.latency = len(self._running), self._curve_of(len(self._running))
            step(self._forward, [job.row for job in self._running])
        except Exception:
            log.exception("decoding failed; the %d texts in flight end here", len(self._running))
            events = [Event(job.id, (), FAILED, job.row and job.row.text.stats) for job in self._running]
            self._running, self._forward = [], BatchForward(self.model)
            return events
        events = []
        for job in self._running:
            text = job.row.text
            reason = text.stats.stop_reason or None
            if reason == NOT_FINITE:
                log.warning("a text whose logits are not finite was ended after %d tokens", len(text.answer))
            events.append(Event(job.id, text.answer[job.done :], reason, text.stats, began=job.id in began))
            job.done = len(text.answer)
        self._running = [job for job, event in zip(self._running, events, strict=True) if event.reason is None]
        return events

    def _drop_cancelled(self) -> None:
        if self._cancelled:
            self._waiting = deque(job for job in self._waiting if job.id not in self._cancelled)
            self._forward.leave([i for i, job in enumerate(self._running) if job.id in self._cancelled])
            self._running = [job for job in self._running if job.id not in self._cancelled]
            self._cancelled.clear()

    def _admit(self) -> set[int]:
        needs = [job.need for job in self._running]
        first = list(itertools.islice(self._waiting, self.limits.rows - len(needs)))
        count = self.limits.admitted(needs, [job.need for job in first])
        new = [self._waiting.popleft() for _ in range(count)]
        self._running += new
        for job in new:
            job.pace = self._pace_of(job.config) if job.config.auto else None
            job.row = Row.make(
                self.model,
                torch.tensor(job.prompt),
                job.config,
                self.rules,
                stops=job.stops,
                pace=job.pace,
                guarded=True,
            )
        if new:
            self._forward.join(count)
            needs += [job.need for job in new]
            shape = self.limits.shape(needs, self._forward.reserved)
            if shape != self._forward.reserved:
                self._forward.reserve(*shape)
        return {job.id for job in new}

    def _pace_of(self, config: DecodingConfig) -> Pace:
        """What is known about this setting's drafts."""
        setting = astuple(replace(config, seed=0, max_new_tokens=1))
        pace = self._paces.pop(setting, None) or Pace(self._curve_of(1))
        self._paces[setting] = pace
        if len(self._paces) > MOST_PACES:
            self._paces.popitem(last=False)
        return pace

    def _curve_of(self, rows: int) -> LatencyCurve:
        """Of forwards over so many texts, to the next power of two: drafts shrink as more texts share the machine. It and those of fewer texts
        are measured once, as far as KV memory has room for so many."""
        power = 1 << (rows - 1).bit_length()
        while power not in self._curves:
            texts = 2 * max(self._curves, default=0) or 1
            widest = max(WIDEST_MEASURED // texts, 2)
            if self._curves and texts * held_in_batch(widest) > self.limits.kv_tokens:
                return self._curves[max(self._curves)]
            self._curves[texts] = batch_latency(self.model, texts, widest)
        return self._curves[power]
