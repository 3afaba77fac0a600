"""A polite stop: the driver that is told to end asks the ranks, through a file, to save and return first."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from tasks.distill.ranks import control_group

T = TypeVar("T")

log = logging.getLogger(__name__)


def stop_politely(work: Callable[[], T], stop_file: Path) -> T:
    """What work() returns or raises. The first SIGTERM or Ctrl-C meanwhile only makes stop_file, whereupon work is expected to end; then
    the signal takes the effect it would have had. A second one takes it at once.

    In the main thread only, others get no signals. `work` runs in a thread of its own: Ray Train leaves the handlers alone there.
    """
    stop_file.unlink(missing_ok=True)  # of a driver that was killed
    if threading.current_thread() is not threading.main_thread():
        return work()
    received: list[int] = []
    outcome: dict[str, Any] = {}
    previous: dict[int, Any] = {}

    def restore() -> None:
        while previous:
            number, handler = previous.popitem()
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            restore()
            _take_effect(number)
            return
        stop_file.touch()
        log.warning("%s: saving a checkpoint before the end; once more ends at once", signal.Signals(number).name)

    def target() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=target, name="stop_politely", daemon=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, handle) or signal.SIG_DFL
    try:
        thread.start()
        while thread.is_alive():
            thread.join(timeout=0.5)
    finally:
        restore()
        stop_file.unlink(missing_ok=True)
    if received:
        _take_effect(received[0])
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _take_effect(number: int) -> None:
    """A Python handler is called, not signalled: Ray's worker processes block SIGINT, and a cancelled stage would go on as if it were finished."""
    handler = signal.getsignal(number)
    if callable(handler):
        handler(number, None)
    else:
        signal.raise_signal(number)


class StopFile:
    """Whether the driver wants the ranks to stop: rank 0 looks, all are told, so that they stop at the same step. Collective."""

    def __init__(self, path: Path, *, rank: int, workers: int) -> None:
        self._path, self._rank, self._workers = path, rank, workers
        self.seen = False

    def __call__(self) -> bool:
        self.seen = self._rank == 0 and self._path.exists()
        if self._workers > 1:
            import torch
            import torch.distributed as dist

            wanted = torch.tensor([self.seen], dtype=torch.uint8)
            dist.broadcast(wanted, src=0, group=control_group())
            self.seen = bool(wanted)
        return self.seen
