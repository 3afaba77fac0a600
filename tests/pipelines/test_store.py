"""Fingerprints name work; a manifest is believed only as long as the files it lists are whole."""

import json
import logging
import threading
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from pipelines.store import MANIFEST, Manifest, Store, fingerprint, plain
from tasks.stage import UserError

WORK = {"stage": "pack", "version": 1, "config": {"n": 16, "w": 8}, "upstream": {"model": "a", "prompts": "b"}, "external": {"hub": "c"}}


FACTS = {
    "stage": "round1/pack",
    "kind": "pack",
    "version": 1,
    "fingerprint": "f" * 16,
    "config": {"n": 16},
    "upstream": {"model": "a"},
    "external": {},
    "metrics": {"rows": 3},
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 1.5,
    "mlflow_run_id": "r",
    "git_sha": None,
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def output(store: Store) -> Path:
    folder = store.folder("pack", "f" * 16)
    store.prepare(folder, resume=False)
    (folder / "parts").mkdir()
    (folder / "parts" / "0.bin").write_bytes(b"0123456789")
    (folder / "empty").touch()
    store.commit(folder, Manifest(**FACTS))
    return folder


def test_fingerprint_ignores_key_order():
    shuffled = {key: dict(reversed(value.items())) if isinstance(value, dict) else value for key, value in reversed(WORK.items())}
    assert fingerprint(**WORK) == fingerprint(**shuffled)
    assert len(fingerprint(**WORK)) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "distill"},
        {"version": 2},
        {"config": {"n": 16, "w": 9}},
        {"config": {"n": 16}},
        {"upstream": {"model": "b", "prompts": "a"}},
        {"external": {"hub": "d"}},
    ],
)
def test_fingerprint_changes_with_each_ingredient(change: dict):
    assert fingerprint(**WORK) != fingerprint(**(WORK | change))


def test_plain_config_leaves_out_what_cannot_change_a_result_and_refuses_paths():
    class Schedule(Enum):
        LINEAR = "linear"

    @dataclass
    class Round:
        schedule: Schedule = Schedule.LINEAR
        shares: tuple[float, ...] = (0.5, 1.0)

    @dataclass
    class Config:
        round: Round = field(default_factory=Round)
        log_every: int = field(default=10, metadata={"fingerprint": False})

    assert plain(Config()) == {"round": {"schedule": "linear", "shares": [0.5, 1.0]}}
    with pytest.raises(TypeError, match="Path"):
        plain({"model": Path("x")})


def test_commit_lists_every_file_and_reads_back(store: Store, output: Path):
    found = store.finished(output)
    assert found.files == {"parts/0.bin": 10, "empty": 0}
    assert found == Manifest(**FACTS, files=found.files)
    assert found.schema_version == 1
    assert not (output / f"{MANIFEST}.tmp").exists()


def test_an_unfinished_or_damaged_output_is_not_finished(store: Store, output: Path):
    part = output / "parts" / "0.bin"
    part.write_bytes(b"012345678")  # cut short
    assert store.finished(output) is None
    part.write_bytes(b"0123456789")
    assert store.finished(output) is not None
    part.unlink()
    assert store.finished(output) is None
    assert store.finished(store.folder("pack", "0" * 16)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": 3}', "\x00\xff"])
def test_an_unreadable_manifest_is_not_finished(store: Store, output: Path, text: str):
    (output / MANIFEST).write_text(text, encoding="latin-1")
    assert store.finished(output) is None


def test_a_manifest_of_another_schema_is_not_finished(store: Store, output: Path):
    facts = json.loads((output / MANIFEST).read_text())
    (output / MANIFEST).write_text(json.dumps(facts | {"schema_version": 99}))
    assert store.finished(output) is None


def test_prepare_resumes_only_what_was_never_finished(store: Store, output: Path):
    unfinished = store.folder("distill", "1" * 16)
    for resume, kept in ((True, True), (False, False)):
        unfinished.mkdir(exist_ok=True)
        (unfinished / "checkpoint").touch()
        store.prepare(unfinished, resume=resume)
        assert (unfinished / "checkpoint").exists() is kept
    store.prepare(output, resume=True)
    assert list(output.iterdir()) == []
    assert not list(store.root.glob(".wiped-*"))


@pytest.mark.parametrize("below", ["", "deep/down"])
def test_an_unwritable_root_is_one_line_that_names_the_setting(tmp_path: Path, below: str):
    (tmp_path / "file").touch()
    root = tmp_path / "file" / below
    with pytest.raises(UserError) as caught:
        Store(root)
    assert f"paths.store={root}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_waiting_lock_says_so_once_and_gets_its_turn(store: Store, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="pipelines.store")
    order = []

    def second():
        with store.lock("abc"):
            order.append("second")

    with store.lock("abc"), store.lock("other"):  # another fingerprint does not wait
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.6)
        assert thread.is_alive()
        order.append("first")
    thread.join(timeout=10)
    assert order == ["first", "second"]
    assert [record.getMessage() for record in caplog.records] == ["another run is computing abc; waiting for its result"]


def test_an_exception_releases_the_lock(store: Store):
    with pytest.raises(RuntimeError), store.lock("abc"):
        raise RuntimeError
    with store.lock("abc"):
        pass
