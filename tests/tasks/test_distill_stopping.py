"""A driver that is told to end asks first; a second signal is not asked twice. Nothing but signals and a file here."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from pathlib import Path

import pytest

from tasks.distill.stopping import StopFile, stop_politely


class Ended(BaseException):
    """What this process would have raised anyway."""


@pytest.fixture
def ending():
    """A handler as pipelines installs one."""

    def handle(number, frame):
        raise Ended

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    yield handle
    for number, handler in previous.items():
        signal.signal(number, handler)


def send(number: int, *, after: float) -> None:
    threading.Timer(after, lambda: signal.pthread_kill(threading.main_thread().ident, number)).start()


def wait_for(path: Path, *, saved: list[str]) -> str:
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    saved.append("checkpoint")
    return "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_work_and_then_takes_effect(tmp_path, ending, number):
    saved: list[str] = []
    send(number, after=0.2)
    with pytest.raises(Ended):
        stop_politely(lambda: wait_for(tmp_path / "stop", saved=saved), tmp_path / "stop")
    assert saved == ["checkpoint"]
    assert signal.getsignal(number) is ending
    assert not (tmp_path / "stop").exists()  # the next run is not stopped


def test_a_blocked_signal_takes_effect_too(tmp_path, ending):
    """Ray's workers block SIGINT; a cancelled task gets it by Python alone, as here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Timer(0.2, lambda: _thread.interrupt_main(signal.SIGINT)).start()
    try:
        with pytest.raises(Ended):
            stop_politely(lambda: wait_for(tmp_path / "stop", saved=[]), tmp_path / "stop")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_second_signal_ends_at_once(tmp_path, ending):
    never = threading.Event()
    send(signal.SIGTERM, after=0.1)
    send(signal.SIGTERM, after=0.4)
    started = time.monotonic()
    with pytest.raises(Ended):
        stop_politely(lambda: never.wait(20), tmp_path / "stop")
    assert time.monotonic() - started < 5
    never.set()
    assert signal.getsignal(signal.SIGTERM) is ending
    assert not (tmp_path / "stop").exists()


def test_a_signal_takes_effect_also_where_the_work_fails(tmp_path, ending):
    def fail():
        wait_for(tmp_path / "stop", saved=[])
        raise RuntimeError("the workers were told to end as well")

    send(signal.SIGTERM, after=0.1)
    with pytest.raises(Ended):
        stop_politely(fail, tmp_path / "stop")


def test_without_a_signal_it_is_only_a_call(tmp_path, ending):
    (tmp_path / "stop").touch()  # of a driver that was killed
    assert stop_politely(lambda: (tmp_path / "stop").exists(), tmp_path / "stop") is False
    with pytest.raises(KeyError, match="x"):
        stop_politely(lambda: {}["x"], tmp_path / "stop")
    assert signal.getsignal(signal.SIGTERM) is ending


def test_an_ignored_signal_stays_ignored(tmp_path):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a background job of a shell
    try:
        send(signal.SIGINT, after=0.1)
        assert stop_politely(lambda: time.sleep(0.5) or (tmp_path / "stop").exists(), tmp_path / "stop") is False
    finally:
        signal.signal(signal.SIGINT, previous)


def test_another_thread_gets_no_signals(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(stop_politely(lambda: 3, tmp_path / "stop")))
    thread.start()
    thread.join()
    assert found == [3]


def test_the_ranks_see_the_file(tmp_path):
    stop = StopFile(tmp_path / "stop", rank=0, workers=1)
    assert not stop()
    (tmp_path / "stop").touch()
    assert stop()
    assert stop.seen
