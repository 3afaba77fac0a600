"""`python -m pipelines.store`: list, explain, prune, verify; and what a run needs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.graph.dag import Graph, plan
from pipelines.graph.execute import execute
from pipelines.store import MANIFEST, Manifest, Store, claim
from pipelines.store.__main__ import main
from pipelines.store.explain import explain
from pipelines.store.inventory import age_of, age_text, size_of, size_text, table
from pipelines.store.prune import prune
from pipelines.store.uses import Use, in_use, recorded, results_of
from pipelines.tracking.tracker import BACKLOG
from tasks.stage import ClusterConfig, UserError
from tests.pipelines.test_dag import Config, Notes, stage
from tests.pipelines.test_store import FACTS

DAY = 86400
OLD = 30 * DAY


def chain(**changes: dict) -> Graph:
    """prompts -> pack -> report."""
    stages = [stage("prompts"), stage("round1/pack", "prompts"), stage("report", "round1/pack")]
    return Graph(replace(item, **changes.get(item.kind, {})) for item in stages)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    execute(plan(chain(), store), store, Notes(), ClusterConfig(parallel_stages=1))
    return store


def folder(store: Store, stage_id: str, graph: Graph | None = None) -> Path:
    graph = graph or chain()
    return store.folder(next(item.kind for item in graph.stages if item.id == stage_id), graph.fingerprints[stage_id])


def grow_old(folder: Path, seconds: float) -> None:
    for path in [*folder.rglob("*"), folder]:
        found = path.stat()
        os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


def finish(store: Store, kind: str, fingerprint: str, *, size: int, age: float) -> Path:
    place = store.folder(kind, fingerprint)
    store.prepare(place, resume=False)
    (place / "data").write_bytes(b"x" * size)
    store.commit(place, Manifest(**{**FACTS, "kind": kind, "fingerprint": fingerprint}))
    grow_old(place, age)
    return place


def use(store: Store, run_folder: Path, graph: Graph | None = None):
    graph = graph or chain()
    folders = {item.id: folder(store, item.id, graph).name for item in graph.stages}
    inputs = {item.id: list(item.inputs.values()) for item in graph.stages}
    return in_use(store, run="mine", folder=run_folder, stages=folders, results=results_of(inputs, folders))


def gone(done) -> list[str]:
    return [entry.kind for entry, _ in done.gone]


def test_explain_names_the_field_that_differs_down_to_its_cause(store: Store):
    assert explain("report", chain(), store)[0].startswith(f"report: cached in {folder(store, 'report').name} (computed as report, ")

    changed = chain(prompts={"config": Config(text="new"), "external": {"data": "b"}}, pack={"version": 2})
    new, old = changed.fingerprints, chain().fingerprints
    assert explain("report", changed, store) == [
        f"report: not cached, report-{new['report']} is not in the store",
        f"  nearest finished: report-{old['report']} (report); there -> here:",
        f"    upstream.input0: {old['round1/pack']} -> {new['round1/pack']}",
        f"      nearest finished: pack-{old['round1/pack']} (round1/pack); there -> here:",
        "        version: 1 -> 2",
        f"        upstream.input0: {old['prompts']} -> {new['prompts']}",
        f"          nearest finished: prompts-{old['prompts']} (prompts); there -> here:",
        "            config.text: prompts -> new",
        "            external.data: (not there) -> b",
    ]


def test_explain_takes_the_nearest_of_several_and_says_what_is_damaged(store: Store):
    near = chain(report={"config": Config(text="report", fail=False), "external": {"a": 1, "b": 2}})
    execute(plan(near, store), store, Notes(), ClusterConfig(parallel_stages=1))
    asked = chain(report={"external": {"a": 1, "b": 3}})
    assert explain("report", asked, store)[2:] == ["    external.b: 2 -> 3"]

    place = folder(store, "report")
    (place / "text").write_text("x" * 25)
    (line,) = explain("report", chain(), store)
    assert line.startswith(f"report: {place.name} is damaged: text has 25 bytes instead of ")
    assert explain(str(place), chain(), store)[0].startswith(f"{place.name}: damaged: text has 25 bytes")
    assert explain(f"{folder(store, 'prompts')}/", chain(), store)[1] == "  is what prompts of this config needs"
    with pytest.raises(UserError, match="explain: no stage 'reprot' in this run; nearest: report"):
        explain("reprot", chain(), store)


def test_list_shows_states_and_who_uses_what(store: Store, tmp_path: Path):
    (folder(store, "report") / "text").unlink()
    store.prepare(store.folder("distill", "0" * 16), resume=True)
    store.prepare(store.folder("export", "1" * 16), resume=True)
    with use(store, tmp_path), store.claim("1" * 16):
        lines = table(store)
    shown = {line.split()[0]: line.split() for line in lines[1:-1]}
    assert {kind: words[3] for kind, words in shown.items()} == {
        "prompts": "finished",
        "pack": "finished",
        "report": "damaged",
        "distill": "unfinished",
        "export": "computing",
    }
    assert shown["pack"][1] == "round1/pack" and shown["pack"][-2:] == ["mine", "(running)"]
    assert lines[-1].startswith("1 computing, 1 damaged, 2 finished, 1 unfinished; ")


def test_prune_by_age_takes_what_no_run_has_used_for_so_long(store: Store, tmp_path: Path):
    for name in ("prompts", "round1/pack", "report"):
        grow_old(folder(store, name), OLD + DAY)
    young = finish(store, "export", "2" * 16, size=1, age=OLD - DAY)
    shown = prune(store, older_than=OLD, max_size=None, dry_run=True)
    assert sorted(gone(shown)) == ["pack", "prompts", "report"] and len(store.entries()) == 4
    with use(store, tmp_path / "no folder"):
        assert gone(prune(store, older_than=OLD, max_size=None)) == []
    assert gone(prune(store, older_than=OLD, max_size=None)) == []  # used a moment ago
    for record in (store.root / ".uses").glob("*.json"):
        os.utime(record, (1, 1))
    assert sorted(gone(prune(store, older_than=OLD, max_size=None))) == ["pack", "prompts", "report"]
    assert [path.name for path in store.root.iterdir() if not path.name.startswith(".")] == [young.name]
    assert recorded(store) == {}


def test_prune_by_size_takes_the_least_recently_used_first_and_stops(tmp_path: Path):
    store = Store(tmp_path)
    for number in range(4):
        finish(store, "export", str(number) * 16, size=1000, age=(4 - number) * DAY)
    sizes = [entry.size for entry in store.entries()]
    most = sum(sizes) - sizes[0] - 1  # one is not enough
    done = prune(store, older_than=None, max_size=most)
    assert [entry.name for entry, why in done.gone if why == "size"] == ["export-" + "0" * 16, "export-" + "1" * 16]
    assert done.size == sum(entry.size for entry in store.entries()) <= most


def test_a_finished_run_keeps_its_results_until_its_folder_is_deleted(store: Store, tmp_path: Path):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    with use(store, run_folder):
        pass
    done = prune(store, older_than=None, max_size=0)
    assert gone(done) == ["prompts"]
    assert sorted(entry.kind for entry in done.needed) == ["pack", "report"] and done.size > 0
    run_folder.rmdir()
    assert sorted(gone(prune(store, older_than=None, max_size=0))) == ["pack", "report"]


@pytest.mark.parametrize(("elsewhere", "age", "kept"), [(False, 0, False), (True, 60, True), (True, 3600, False)])
def test_a_run_that_died_needs_nothing_any_more(store: Store, tmp_path: Path, elsewhere: bool, age: float, kept: bool):
    """On another machine it counts as dead when it has not said anything for a quarter of an hour."""
    owner = {**claim.me(), "process.started": "1"} | ({"process.host": "elsewhere", "boot": "other"} if elsewhere else {})
    names = {item.id: folder(store, item.id).name for item in chain().stages}
    record = Use(run="dead", folder=str(tmp_path), owner=owner, stages=names, results=list(names.values()))
    store.write_note("dead.json", json.dumps(vars(record)))
    path = store.root / ".uses" / "dead.json"
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    assert (gone(prune(store, older_than=None, max_size=0)) == []) is kept


def test_what_a_run_is_computing_and_what_is_unfinished_and_young_stays(store: Store):
    place = store.folder("distill", "0" * 16)
    store.prepare(place, resume=True)
    (place / "checkpoint").touch()
    grow_old(place, OLD * 2)
    with store.claim("0" * 16):
        assert "distill" not in gone(prune(store, older_than=OLD, max_size=0))
    assert gone(prune(store, older_than=OLD, max_size=None)) == ["distill"]


def test_a_record_that_cannot_be_written_costs_a_warning(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (store.root / ".uses").rmdir()
    (store.root / ".uses").touch()
    with use(store, tmp_path):
        pass
    assert "is not recorded in the store" in caplog.text


def test_the_command_line(store: Store, capsys: pytest.CaptureFixture):
    where = f"store={store.root}"
    assert main(["list", where]) == 0
    assert "3 finished" in capsys.readouterr().out
    assert main(["verify", where]) == 0
    assert main(["prune", where, "max_size=0B", "dry_run=true"]) == 0
    assert "would be freed" in capsys.readouterr().out and len(store.entries()) == 3
    (folder(store, "prompts") / "text").write_text("PROMPTS")
    assert main(["verify", where]) == 1
    assert "2 whole, 1 damaged" in capsys.readouterr().out
    assert main(["prune", where, "max_size=0B"]) == 0
    assert store.entries() == []
    assert main(["explain", "prompts", "experiment=smoke", f"paths.store={store.root}"]) == 0
    assert "no finished prompts is there to compare with" in capsys.readouterr().out
    assert main([]) == main(["list", "help"]) == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prun"], "prun: no such command; there are list, explain, prune and verify"),
        (["prune", "older_than=30"], "older_than: expected a number and one of s, m, h, d, w, got '30'"),
        (["prune", "max_size=20 apples"], "max_size: expected a number and one of B, KB, MB, GB, TB, got '20 APPLES'"),
        (["prune", "olderthan=3d"], "olderthan: no such setting; nearest: older_than"),
        (["list", "store=/no/such/place"], "store=/no/such/place: no such folder"),
        (["explain", "reprot", "experiment=smoke"], "explain: no stage 'reprot'"),
        (["explain", "report", "experiment=smok"], "experiment=smok: no such config"),
        (["explain", "report", "nosuch=1"], "nosuch: no such setting"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_explain_tells_all_mistakes_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "report", "experiment=smoke", "nosuch=1", "distill.epochs=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == ["error: nosuch: no such setting", "error: distill.epochs must be above 0, got 0.0"]


def test_records_that_wait_for_mlflow_are_no_left_overs(store: Store):
    waiting = store.root / BACKLOG / "run.jsonl"
    waiting.parent.mkdir()
    waiting.write_text("{}")
    grow_old(waiting.parent, OLD)
    assert len(prune(store, older_than=-60, max_size=0, left_over_after=-60).gone) == 3
    assert waiting.exists()


def test_sizes_and_ages_read_as_they_are_written():
    assert (size_of("20GB"), size_of("1.5 kb"), age_of("30d"), age_of("12h")) == (20 * 10**9, 1500, 30 * DAY, DAY / 2)
    assert (size_text(0), size_text(1500), size_text(999_000_000), age_text(5), age_text(7200), age_text(-1)) == (
        "0 B",
        "1.5 KB",
        "999 MB",
        "5s",
        "2h",
        "0s",
    )


def test_a_deletion_that_was_cut_short_is_finished_by_prune(store: Store):
    place = folder(store, "prompts")
    left = place.with_name(f".wiped-{place.name}")
    place.rename(left)
    (left / MANIFEST).unlink()
    assert prune(store, older_than=None, max_size=None).gone == []
    grow_old(left, 2 * DAY)
    assert [why for _, why in prune(store, older_than=None, max_size=None).gone] == ["left over"]
    assert not left.exists()
