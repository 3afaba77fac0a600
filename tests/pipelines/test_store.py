"""Fingerprints name work; a manifest is believed only as long as the files it lists are whole. Claims: test_store_claim."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from pipelines import full_run
from pipelines.store import MANIFEST, Damaged, Manifest, Store, files, fingerprint, open_store, plain
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
    assert found == Manifest(**FACTS, files=found.files, hashes=found.hashes)
    assert found.hashes["parts/0.bin"] == hashlib.sha256(b"0123456789").hexdigest()
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


def test_a_changed_byte_is_found_where_the_size_is_the_same(store: Store, output: Path, caplog: pytest.LogCaptureFixture):
    (output / "parts" / "0.bin").write_bytes(b"0123456780")
    assert store.finished(output) is None
    assert store.finished(output) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{output.name}: parts/0.bin has other content than was written (sha256 differs); it counts as not there"
    ]
    store.prepare(output, resume=True)
    assert list(output.iterdir()) == []  # nothing of it is resumed


def test_a_large_file_is_hashed_again_only_when_it_was_touched(store: Store, output: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "SMALL", 4)
    part, hashed = output / "parts" / "0.bin", []
    monkeypatch.setattr(files, "sha256", lambda path, original=files.sha256: (hashed.append(path.name), original(path))[1])
    store.commit(output, Manifest(**FACTS))
    hashed.clear()
    assert store.finished(output) and hashed == ["empty"]
    os.utime(part, (1, 1))  # as a copy of the store would have it
    assert store.finished(output) and store.finished(output)
    assert hashed.count("0.bin") == 1
    part.write_bytes(b"0123456780")
    assert store.finished(output) is None


def test_only_verify_finds_what_no_write_has_done_and_then_everybody_knows(store: Store, output: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "SMALL", 4)
    store.commit(output, Manifest(**FACTS))
    part = output / "parts" / "0.bin"
    before = part.stat()
    assert store.verify(output) is None
    part.write_bytes(b"0123456780")
    os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns))  # a bit that flipped on the disk
    assert store.finished(output) is not None
    assert "parts/0.bin has other content" in store.verify(output)
    assert store.finished(output) is None


def test_manifests_from_before_there_were_hashes_and_from_later_versions_are_read(store: Store, output: Path):
    facts = json.loads((output / MANIFEST).read_text())
    old = {name: value for name, value in facts.items() if name not in ("hashes", "place")}
    (output / MANIFEST).write_text(json.dumps(old))
    assert store.finished(output).files == {"parts/0.bin": 10, "empty": 0}
    assert store.verify(output) is None
    (output / "parts" / "0.bin").write_bytes(b"short")
    assert store.finished(output) is None
    (output / "parts" / "0.bin").write_bytes(b"0123456789")
    (output / MANIFEST).write_text(json.dumps(facts | {"colour": "red"}))
    assert store.finished(output) is not None


def test_an_input_that_is_gone_or_damaged_is_not_handed_to_a_stage(store: Store, output: Path):
    store.fetch(output)
    (output / "empty").unlink()
    with pytest.raises(Damaged, match=f"{output.name} is gone from the store, or damaged"):
        store.fetch(output)


def test_a_file_that_cannot_be_read_is_damage_and_no_crash(store: Store, output: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(files, "sha256", broken)
    assert store.finished(output) is None
    assert "cannot be read (Input/output error)" in store.verify(output)


def test_what_a_deletion_had_to_leave_does_not_stop_the_next_one(store: Store, output: Path, monkeypatch: pytest.MonkeyPatch):
    """On NFS a file that is being read elsewhere stays, and its folder with it."""
    monkeypatch.setattr("pipelines.store.disk.shutil.rmtree", lambda path, ignore_errors=False: None)
    for _ in range(2):
        store.prepare(output, resume=False)
        assert list(output.iterdir()) == []
    monkeypatch.undo()
    store.prepare(output, resume=False)
    assert not list(store.root.glob(".wiped-*"))


@pytest.mark.parametrize(
    "given", ["paths.store='s3://b/x?secret_key=geheim'", "+paths.store=s3://u:geheim@b/x", "paths.store='s3://b/x','s3://b/y?access_key=geheim'"]
)
def test_credentials_on_the_command_line_are_refused_before_hydra_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, given: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["full_run", "experiment=smoke", "dry_run=true", given])
    assert full_run.main() == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: paths.store=s3://b/") and "geheim" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file://relative/place", "three slashes"),
        ("nothing://x/y", "no filesystem for this"),
        ("sftp://host/x", "install that module"),
        ("s3://", "names no bucket"),
        ("s3://user:geheim@bucket/x", "holds a password"),
        ("s3://bucket/x?secret_key=geheim", "holds secret_key in its query"),
        ("s3://bucket/x?colour=red", "colour"),
    ],
)
def test_a_uri_that_cannot_be_used_is_one_line_without_credentials(tmp_path: Path, uri: str, message: str):
    with pytest.raises(UserError) as caught:
        open_store(uri, work=tmp_path)
    assert str(caught.value).startswith("paths.store=") and message in str(caught.value)
    assert "geheim" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_and_a_file_uri_are_the_same_store(tmp_path: Path):
    assert open_store(f"file://{tmp_path}/a%20b", work=tmp_path / "w").root == open_store(f"{tmp_path}/a b", work=tmp_path / "w").root
    assert not (tmp_path / "w").exists()
