"""The store on object storage, against a local S3 server: real requests, real objects, the real graph on fake stages."""

from __future__ import annotations

import logging
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import FileSelector, FileSystem

from pipelines.graph.dag import plan
from pipelines.graph.execute import StageFailed, execute
from pipelines.store import Damaged, Manifest, Store, open_store
from pipelines.store.explain import explain
from pipelines.store.inventory import table
from pipelines.store.objects import ObjectStore
from pipelines.store.prune import prune
from pipelines.store.uses import in_use, recorded, results_of
from pipelines.sweep import _noise
from tasks.stage import ClusterConfig, UserError
from tests.pipelines.test_dag import Notes, diamond
from tests.pipelines.test_store import FACTS

SECRET = "not-to-be-shown"
ONE_BY_ONE = ClusterConfig(parallel_stages=1)  # no Ray
TEXT = {"Content-Type": "text/plain"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port. Its own log says a line per request."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"{host}:{port}"
    started.stop()


@pytest.fixture
def uri(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a bucket of this test's own."""
    for name, value in {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(request.node.name))}"
    urllib.request.urlopen(urllib.request.Request(f"http://{server}/{bucket}", method="PUT")).close()
    return address(server, f"{bucket}/some/store")


def address(server: str, place: str) -> str:
    return f"s3://{place}?endpoint_override={server}&scheme=http&region=us-east-1"


def run(store: Store, graph=None, force: tuple[str, ...] = ()) -> Notes:
    notes = Notes()
    notes.manifests = execute(plan(graph or diamond(), store, force), store, notes, ONE_BY_ONE)
    return notes


def folder(store: Store, stage: str, graph=None) -> Path:
    return store.folder(stage, (graph or diamond()).fingerprints[stage])


def text(store: Store, stage: str, graph=None) -> str:
    place = folder(store, stage, graph)
    store.fetch(place)
    return (place / "text").read_text()


def object_path(store: ObjectStore, stage: str) -> str:
    name = folder(store, stage).name
    return f"{store.base}/{name}/{store.manifest(name).place}/text"


def overwrite(store: ObjectStore, path: str, content: bytes) -> None:
    with store.filesystem.open_output_stream(path) as stream:
        stream.write(content)


def test_a_pipeline_goes_there_and_back(uri: str, tmp_path: Path):
    first = open_store(uri, work=tmp_path / "here")
    assert run(first).ran == ["a", "b", "c", "d", "e"]

    second = open_store(uri, work=tmp_path / "there")  # another machine
    notes = run(second)
    assert (notes.ran, notes.cached) == ([], ["a", "b", "c", "d", "e"])
    assert not list((tmp_path / "there").glob("*-*/*"))  # what is cached is not downloaded
    assert text(second, "d") == "abacd"

    shutil.rmtree(tmp_path / "there")  # a work folder holds nothing that is not in the store
    third = open_store(uri, work=tmp_path / "there")
    changed = diamond(c={"version": 2})
    assert run(third, changed).ran == ["c", "d"]  # from a and b, fetched
    assert text(third, "d", changed) == "abacd"
    assert sorted(entry.state for entry in third.entries()) == ["finished"] * 7


def test_two_runs_at_once_write_places_of_their_own_and_either_result_will_do(uri: str, tmp_path: Path):
    both, ran = threading.Barrier(2), {}

    class Together(ObjectStore):
        def _upload(self, folder: Path, manifest: Manifest) -> Manifest:
            if folder.name.startswith("a-"):
                both.wait(60)  # so that neither sees the other's result in time
            return super()._upload(folder, manifest)

    def start(name: str) -> None:
        store = open_store(uri, work=tmp_path / name)
        store.__class__ = Together
        ran[name] = run(store).ran

    threads = [threading.Thread(target=start, args=(name,)) for name in ("x", "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all("a" in stages for stages in ran.values())
    reader = open_store(uri, work=tmp_path / "reader")
    assert {stage: text(reader, stage) for stage in "abcd"} == {"a": "a", "b": "ab", "c": "ac", "d": "abacd"}
    spare = [entry for entry in reader.entries() if entry.state == "left over"]
    assert [entry.name.partition("/")[0] for entry in spare].count(folder(reader, "a").name) == 1
    assert prune(reader, older_than=None, max_size=None).gone == []  # could still be on their way
    assert len(prune(reader, older_than=None, max_size=None, left_over_after=-60).gone) == len(spare)
    assert run(open_store(uri, work=tmp_path / "later")).ran == []


def test_an_upload_that_was_cut_short_is_taken_by_nobody_and_done_again_without_computing(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="pipelines.store")
    store, put, seen = open_store(uri, work=tmp_path / "here"), ObjectStore._put, []

    def cut(self: ObjectStore, name: str, content: bytes | Path) -> None:
        if name.endswith("/text"):
            put(self, name, b"h")
            seen.append(name)
            raise OSError("AWS Error NETWORK_CONNECTION during UploadPart: curlCode: 28")
        put(self, name, content)

    monkeypatch.setattr(ObjectStore, "_put", cut)
    with pytest.raises(StageFailed) as caught:
        run(store)
    (message,) = map(str, caught.value.failures.values())
    assert message.startswith("paths.store=s3://") and "upload failed: it cannot be reached" in message and "the same command uploads it" in message
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    assert seen and store.finished(folder(store, "a")) is None
    with pytest.raises(Damaged, match="is gone from the store"):
        store.fetch(folder(store, "a"))
    assert {entry.state for entry in store.entries()} == {"left over"}

    again = run(open_store(uri, work=tmp_path / "here"))
    assert "a" not in again.ran and "uploading it" in caplog.text
    assert text(open_store(uri, work=tmp_path / "elsewhere"), "d") == "abacd"


def test_an_object_that_changed_is_found_when_it_is_fetched_and_computed_again(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = open_store(uri, work=tmp_path / "here")
    run(store)
    overwrite(store, object_path(store, "b"), b"XX")  # the size that it had
    other = open_store(uri, work=tmp_path / "there")
    changed = diamond(d={"version": 2})
    assert run(other, changed).ran == ["b", "d"]
    assert "in the store has other content than was written; computing it again" in caplog.text
    assert text(other, "d", changed) == "abacd"
    assert text(open_store(uri, work=tmp_path / "reader"), "b") == "ab"


@pytest.mark.parametrize("harm", ["truncated", "deleted", "manifest"])
def test_half_an_output_counts_as_none(uri: str, tmp_path: Path, harm: str):
    store = open_store(uri, work=tmp_path / "here")
    run(store)
    if harm == "truncated":
        overwrite(store, object_path(store, "d"), b"ab")
    elif harm == "deleted":
        store.filesystem.delete_file(object_path(store, "d"))
    else:
        overwrite(store, f"{store.base}/{folder(store, 'd').name}/manifest.json", b'{"stage": "d"')
    assert run(open_store(uri, work=tmp_path / "there")).ran == ["d"]
    assert text(open_store(uri, work=tmp_path / "reader"), "d") == "abacd"


def test_explain_reads_no_object(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = open_store(uri, work=tmp_path / "one")
    run(store)
    monkeypatch.setattr(ObjectStore, "_download", lambda *given: pytest.fail("was downloaded"))
    graph = diamond()
    place = store.folder("d", graph.fingerprints["d"]).name
    assert explain(place, graph, store)[0].startswith(f"{place}: finished (d, ")
    manifest = store.manifest(place)
    store.filesystem.delete_file(f"{store.base}/{place}/{manifest.place}/{next(iter(manifest.files))}")
    assert explain(place, graph, store)[0].startswith(f"{place}: damaged: {next(iter(manifest.files))} is missing from the store")
    assert store.manifest(place) is not None  # it is not explaining that withdraws it


def test_verify_reads_every_object(uri: str, tmp_path: Path):
    store = open_store(uri, work=tmp_path / "here")
    run(store)
    assert store.verify(folder(store, "b")) is None
    overwrite(store, object_path(store, "b"), b"XX")
    assert store.finished(folder(store, "b")) is not None
    assert "text in the store has other content" in store.verify(folder(store, "b"))
    assert store.finished(folder(store, "b")) is None


def test_a_resumable_stage_goes_on_from_the_work_folder(uri: str, tmp_path: Path):
    def graph(*, fail: bool):
        from dataclasses import replace

        one = diamond(a={"resumable": True})
        stages = [replace(stage, config=replace(stage.config, fail=fail)) if stage.id == "a" else stage for stage in one.stages]
        return type(one)([stages[0]])

    store = open_store(uri, work=tmp_path / "here")
    broken = graph(fail=True)
    with pytest.raises(StageFailed):
        run(store, broken)
    place = folder(store, "a", broken)
    assert (place / "attempts").read_text() == "x"
    with pytest.raises(StageFailed):
        run(open_store(uri, work=tmp_path / "here"), broken)
    assert (place / "attempts").read_text() == "xx"


def test_prune_removes_the_manifest_first_and_nothing_that_a_run_uses(uri: str, tmp_path: Path):
    store = open_store(uri, work=tmp_path / "here")
    graph = diamond()
    run(store, graph)
    folders = {stage.id: folder(store, stage.id).name for stage in graph.stages}
    inputs = {stage.id: list(stage.inputs.values()) for stage in graph.stages}
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    with in_use(store, run="mine", folder=run_folder, stages=folders, results=results_of(inputs, folders)):
        assert prune(store, older_than=-60, max_size=None).gone == []  # it runs
    shown = prune(store, older_than=-60, max_size=None, dry_run=True)
    assert [entry.name for entry, _ in shown.gone] == [folders["a"]]  # d and e are the results, b and c what d read
    assert store.finished(store.root / folders["a"]) is not None
    assert [entry.name for entry, _ in prune(store, older_than=-60, max_size=None).gone] == [folders["a"]]
    assert store.finished(store.root / folders["a"]) is None and store.finished(store.root / folders["d"]) is not None
    run_folder.rmdir()
    assert len(prune(store, older_than=-60, max_size=None).gone) == 4
    assert store.entries() == [] and recorded(store) == {}


def test_what_another_has_removed_meanwhile_is_no_error(uri: str, tmp_path: Path):
    store = open_store(uri, work=tmp_path / "here")
    run(store)
    store.write_note("run.json", "{}")
    entries = store.entries()
    assert len(entries) == 5
    for _ in range(2):  # as two prunes at once would
        store.withdraw(entries[0].name)
        assert all(store.remove(entry) for entry in entries)
        store.drop_note("run.json")
    assert store.entries() == [] and store.notes() == {}


def test_an_output_has_an_address_that_outlives_the_work_folder(uri: str, tmp_path: Path):
    store = open_store(uri, work=tmp_path / "here")
    run(store)
    place = folder(store, "a")
    source, _, query = store.address(place, store.finished(place)).partition("?")
    assert f"{source}/text" == f"s3://{object_path(store, 'a')}" and uri.endswith(f"?{query}")
    found, base = FileSystem.from_uri(f"{source}?{query}")
    assert [info.base_name for info in found.get_file_info(FileSelector(base, recursive=True)) if info.base_name == "text"] == ["text"]


def test_a_sweeps_table_reads_what_was_never_downloaded(uri: str, tmp_path: Path):
    store = open_store(uri, work=tmp_path / "there")
    pack = store.folder("pack", FACTS["fingerprint"])
    store.prepare(pack, resume=False)
    (pack / "noise.json").write_text('{"edges": [0, 1], "counts": [3]}')
    store.commit(pack, Manifest(**{**FACTS, "metrics": {"noise_ratio_mean": 0.5}}))
    here = tmp_path / "here"
    record = {"stages": {"round1/pack": str(here / pack.name)}, "config": {"paths": {"store": uri}}}
    assert _noise(record) == {"edges": [0, 1], "counts": [3], "mean": 0.5}
    record["stages"]["round2/pack"] = str(here / f"pack-{'0' * 16}")
    assert _noise(record) is None  # the last round was not packed


def test_two_runs_with_one_work_folder_wait_for_each_other(uri: str, tmp_path: Path):
    store = open_store(uri, work=tmp_path / "here")
    with store.claim(FACTS["fingerprint"]):
        assert open_store(uri, work=tmp_path / "here").is_claimed(FACTS["fingerprint"])
        assert not open_store(uri, work=tmp_path / "there").is_claimed(FACTS["fingerprint"])


@pytest.mark.parametrize("read_only", [False, True])
def test_a_bucket_that_is_not_there_or_not_ours_is_one_line_with_the_fix(uri: str, server: str, tmp_path: Path, read_only: bool):
    with pytest.raises(UserError, match="^paths.store=s3://no-such-bucket/x: there is no such bucket; make it, or correct the name$"):
        open_store(address(server, "no-such-bucket/x"), work=tmp_path, read_only=read_only)
    closed = urllib.request.Request(f"http://{server}/moto-api/reset-auth", data=b"0", headers=TEXT)
    urllib.request.urlopen(closed).close()  # from now on it asks for an account, and there is none
    try:
        with pytest.raises(UserError, match="no access; set AWS_ACCESS_KEY_ID") as caught:
            open_store(uri, work=tmp_path, read_only=read_only)
    finally:
        urllib.request.urlopen(urllib.request.Request(f"http://{server}/moto-api/reset-auth", data=b"inf", headers=TEXT)).close()
    assert SECRET not in str(caught.value) and "testing" not in str(caught.value) and "\n" not in str(caught.value)
    open_store(uri, work=tmp_path)


def test_a_filesystem_that_only_fsspec_knows(tmp_path: Path):
    store = open_store("memory://some/place", work=tmp_path / "here")
    run(store)
    assert run(open_store("memory://some/place", work=tmp_path / "there")).ran == []
    assert text(open_store("memory://some/place", work=tmp_path / "reader"), "d") == "abacd"
    assert "5 finished" in table(store)[-1]  # it does not tell when a file was written: none is ever old
    assert prune(store, older_than=60, max_size=None).gone == []
