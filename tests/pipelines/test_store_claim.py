"""Claims: one holder at a time, whoever waits, dies, sleeps or comes late. Two whole processes: test_dag."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelines.process import identity
from pipelines.store import MANIFEST, ClaimLost, Manifest, Store, claim
from tests.pipelines.test_store import FACTS

ELSEWHERE = {"process.host": "elsewhere pid:[1]", "process.pid": "7", "process.started": "1", "boot": "other", "since": "yesterday", "token": "t"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def place(store: Store) -> Path:
    return store.root / ".claims" / "abc"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "POLL", 0.02)
    monkeypatch.setattr(claim, "EXPIRY", 0.5)


def hold(place: Path, number: int, owner: dict) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    file = place / str(number)
    file.write_text(json.dumps(owner))
    return file


def test_whoever_waits_says_for_whom_once_and_gets_its_turn(store: Store, quick: None, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="pipelines.store")
    order = []

    def second():
        with store.claim("abc"):
            order.append("second")

    with store.claim("abc"), store.claim("other"):  # another fingerprint does not wait
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        order.append("first")
    thread.join(timeout=30)
    assert order == ["first", "second"]
    (message,) = [record.getMessage() for record in caplog.records]
    host = identity()["process.host"].split()[0]
    assert message.startswith(f"abc: process {os.getpid()} on {host} (since 20") and message.endswith("is computing it; waiting for its result")


def test_an_exception_gives_it_back(store: Store, place: Path):
    for _ in range(2):
        with pytest.raises(RuntimeError), store.claim("abc"):
            assert store.is_claimed("abc")
            raise RuntimeError
    assert not store.is_claimed("abc")
    assert [path.name for path in place.iterdir()] == ["2.free"]


def test_a_dead_process_of_this_machine_loses_it_at_once(store: Store, place: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="pipelines.store")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    hold(place, 4, {**claim.me(), "process.pid": str(child.pid)})
    with store.claim("abc"):
        assert [path.name for path in place.iterdir()] == ["5"]
    assert "has ended; taking over" in caplog.text


def test_on_another_machine_only_the_signs_of_life_count_and_no_clock(store: Store, place: Path, quick: None):
    file, taken = hold(place, 1, ELSEWHERE), threading.Event()

    def wait():
        with store.claim("abc"):
            taken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for beat in range(12):  # twice its expiry, by a clock that runs backwards from the far future
        os.utime(file, (4e9 - beat, 4e9 - beat))
        assert not taken.wait(0.1)
    assert taken.wait(30)
    thread.join()


def test_whoever_slept_has_not_watched(place: Path, monkeypatch: pytest.MonkeyPatch):
    hold(place, 1, ELSEWHERE)
    now = [0.0]
    monkeypatch.setattr(claim.time, "monotonic", lambda: now[0])
    watch = claim._Watch(place, 1)
    watch.ended()
    now[0] = 100_000.0
    assert watch.ended() is None
    for _ in range(int(claim.EXPIRY / claim.LONGEST_LOOK)):
        now[0] += claim.LONGEST_LOOK
        ended = watch.ended()
    assert "no sign of life" in ended


def test_a_claim_that_is_just_being_written_is_held(place: Path, quick: None):
    hold(place, 1, {}).write_text("")
    assert claim.acquire(place, wait=False) is None
    assert claim.is_held(place)


def test_of_many_who_take_over_at_once_one_is_in_at_a_time(store: Store, place: Path, quick: None):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    hold(place, 1, {**claim.me(), "process.pid": str(child.pid)})
    inside, most, entered = [], [], []

    def enter():
        for _ in range(3):
            with Store(store.root).claim("abc"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.005)
                inside.pop()
                entered.append(1)

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(entered) == 24
    assert max(most) == 1


def test_a_late_one_cannot_take_a_number_that_others_have_passed(place: Path):
    """It saw 1 dead, slept, and meanwhile 2 was taken and given back, or 3 has it."""
    hold(place, 3, ELSEWHERE).rename(place / "3.free")
    for number in (2, 3):
        assert not claim._take(place, number)
        assert sorted(path.name for path in place.iterdir()) == ["3.free"]
    hold(place, 4, ELSEWHERE)
    assert not claim._take(place, 4)
    assert json.loads((place / "4").read_text()) == ELSEWHERE


def test_whoever_lost_its_claim_cannot_commit_and_is_stopped(store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    stopped = threading.Event()
    monkeypatch.setattr(claim, "BEAT", 0.05)
    monkeypatch.setattr(claim, "_stop_this_run", stopped.set)
    folder, fingerprint = store.folder("pack", FACTS["fingerprint"]), FACTS["fingerprint"]
    with store.claim(fingerprint):
        store.prepare(folder, resume=False)
        store.commit(folder, Manifest(**FACTS))  # still the holder: by way of the next number
        (folder / MANIFEST).unlink()
        assert not stopped.wait(0.3)
        place = store.root / ".claims" / fingerprint
        hold(place, 3, ELSEWHERE)
        with pytest.raises(ClaimLost, match="process 7 on elsewhere"):
            store.commit(folder, Manifest(**FACTS))
        assert not (folder / MANIFEST).exists()
        assert stopped.wait(30)
    assert "this run stops" in caplog.text
    assert (place / "3").exists()  # what is another's stays


def test_a_full_disk_leaves_no_claim_that_others_would_wait_for(store: Store, place: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(claim.os, "fsync", full)
    with pytest.raises(OSError, match="No space"), store.claim("abc"):
        pass
    assert list(place.iterdir()) == []


def test_a_sign_of_life_is_given(store: Store, place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(claim, "BEAT", 0.05)
    with store.claim("abc"):
        os.utime(place / "1", (1, 1))
        deadline = time.monotonic() + 30
        while (place / "1").stat().st_mtime == 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
