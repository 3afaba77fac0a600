"""This process as a tracker must see it: who it is, whether a recorded one still lives, and SIGTERM as an exception."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import psutil

START_TOLERANCE = 60.0  # seconds a start time may move when the system clock is set


class Terminated(SystemExit):
    """SIGTERM arrived. Unless caught, the process exits with 143, as the shell reports a terminated one."""

    def __init__(self) -> None:
        super().__init__(143)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated in the main thread, so that clean-up code runs. Does nothing in any other thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child has nothing of ours to clean up
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the clean-up short
        raise Terminated

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except SystemExit as request:
        if request.code == signal.SIGTERM:  # `ray.init` has put its own handler in place of ours
            raise Terminated from request
        raise
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def identity() -> dict[str, str]:
    """Tags that name this process among all that ever ran on any host."""
    return {"process.host": _host(), "process.pid": str(os.getpid()), "process.started": str(psutil.Process().create_time())}


def is_gone(tags: Mapping[str, str]) -> bool:
    """Whether the process that `identity` described has ended. False when it ran where this one cannot look."""
    if tags.get("process.host") != _host():
        return False
    try:
        process = psutil.Process(int(tags["process.pid"]))
        moved = abs(process.create_time() - float(tags["process.started"]))
        return moved > START_TOLERANCE or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _host() -> str:
    """Host name and, on Linux, the namespace its process ids belong to: containers of one host name do not see each other's."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
