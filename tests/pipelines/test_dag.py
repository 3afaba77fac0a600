"""Order, selection and caching of stages, with a tracker that only takes notes (MLflow itself: test_tracking)."""

import logging
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipelines.graph.dag import Graph, Stage, plan
from pipelines.graph.execute import StageFailed, execute
from pipelines.store import MANIFEST, Store
from tasks.stage import ClusterConfig, UserError

REPOSITORY = Path(__file__).parents[2]


@dataclass
class Config:
    text: str = ""
    fail: bool = False


def concatenate(config: Config, inputs: dict, output: Path, context) -> dict:
    """A stage: its text after those of its inputs. Leaves `attempts` behind, so that a test sees what it started from."""
    with (output / "attempts").open("a") as attempts:
        attempts.write("x")
    if config.fail:
        raise RuntimeError("boom")
    whole = "".join((inputs[name] / "text").read_text() for name in sorted(inputs)) + config.text
    (output / "text").write_text(whole)
    context.report({"length": len(whole)}, 1)
    return {"length": len(whole), "share": 0.25}


class Notes:
    """Stands in for a Tracker."""

    def __init__(self):
        self.ran, self.cached, self.failed, self.metrics = [], [], [], {}

    @contextmanager
    def stage(self, stage_id, *, fingerprint, params, cached):
        try:
            yield stage_id
        except BaseException:
            self.failed.append(stage_id)
            raise
        (self.cached if cached else self.ran).append(stage_id)

    def reporter(self, run_id):
        return lambda metrics, step: None

    def log_metrics(self, metrics, *, run_id=None):
        self.metrics[run_id] = dict(metrics)

    def log_lineage(self, planned, manifest, *, run_id, folder):
        pass


def stage(stage_id: str, *upstream: str, text: str | None = None, **changes) -> Stage:
    config = Config(text=stage_id if text is None else text)
    inputs = {f"input{i}": name for i, name in enumerate(upstream)}
    return replace(Stage(stage_id, stage_id.rsplit("/")[-1], 1, f"{__name__}:concatenate", config, inputs), **changes)


def diamond(**changes: dict) -> Graph:
    stages = [stage("a"), stage("b", "a"), stage("c", "a"), stage("d", "b", "c"), stage("e")]
    return Graph(replace(item, **changes.get(item.id, {})) for item in stages)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def run(graph: Graph, store: Store, force: tuple[str, ...] = ()) -> Notes:
    notes = Notes()
    notes.manifests = execute(plan(graph, store, force), store, notes, ClusterConfig())
    return notes


def ids(graph: Graph) -> list[str]:
    return [item.id for item in graph.stages]


def test_order_is_the_declared_one_where_that_is_possible():
    assert ids(Graph([stage("a"), stage("b", "a"), stage("c"), stage("d", "b")])) == ["a", "b", "c", "d"]
    assert ids(Graph([stage("d", "b", "c"), stage("c", "a"), stage("b", "a"), stage("a")])) == ["a", "c", "b", "d"]
    assert ids(Graph([])) == []


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([stage("a", "nowhere")], "input 'input0' names the unknown stage 'nowhere'"),
        ([stage("a"), stage("b"), stage("a")], "'a' is declared twice"),
        ([stage("a", "b"), stage("b", "a"), stage("c")], "depend on each other: (a <- b <- a|b <- a <- b)"),
    ],
)
def test_a_broken_graph_is_refused(stages: list, message: str):
    with pytest.raises(ValueError, match=message):
        Graph(stages)


def test_a_change_reaches_exactly_the_descendants():
    before, after = diamond().fingerprints, diamond(b={"version": 2}).fingerprints
    assert {name for name in before if before[name] != after[name]} == {"b", "d"}
    assert diamond(a={"external": {"hub": "x"}}).fingerprints["c"] != before["c"]
    assert diamond(a={"resumable": True, "run": "elsewhere:run"}).fingerprints == before


def test_until_keeps_a_stage_and_its_ancestors():
    graph = diamond()
    assert ids(graph.until("d")) == ["a", "b", "c", "d"]
    assert ids(graph.until("b")) == ["a", "b"]
    assert graph.until("d").fingerprints["d"] == graph.fingerprints["d"]


def test_an_unknown_stage_is_answered_with_the_nearest_names(store: Store):
    graph = Graph([stage("prompts"), stage("round1/distill"), stage("round2/distill"), stage("report")])
    with pytest.raises(UserError, match=r"until: no stage 'round1/distil' .* nearest: round1/distill, round2/distill"):
        graph.until("round1/distil")
    with pytest.raises(UserError, match=r"force: no stage 'zzz' .* nearest: prompts, round1/distill, round2/distill, report"):
        plan(graph, store, force=["report", "zzz"])


def test_second_run_is_cached_and_a_change_recomputes_only_what_follows(store: Store):
    assert not any(item.cached for item in plan(diamond(), store))
    first = run(diamond(), store)
    assert first.ran == ["a", "b", "c", "d", "e"]
    assert (store.folder("d", diamond().fingerprints["d"]) / "text").read_text() == "abacd"
    assert first.metrics["d"].keys() == {"length", "share", "seconds", "seconds_start_up", "seconds_ours"}

    assert all(item.cached for item in plan(diamond(), store))
    second = run(diamond(), store)
    assert (second.ran, second.cached) == ([], ["a", "b", "c", "d", "e"])
    assert second.metrics["d"] == {"length": 5, "share": 0.25}
    assert second.manifests == first.manifests

    third = run(diamond(c={"config": Config(text="C")}), store)
    assert (third.ran, third.cached) == (["c", "d"], ["a", "b", "e"])
    assert run(Graph([]), store).manifests == {}


def test_equal_work_under_two_ids_is_done_once(store: Store):
    twins = Graph([stage("round1/pack", text="x"), stage("round2/pack", text="x"), stage("join", "round1/pack", "round2/pack")])
    notes = run(twins, store)
    assert (notes.ran, notes.cached) == (["round1/pack", "join"], ["round2/pack"])
    assert notes.manifests["round2/pack"].stage == "round1/pack"


def test_a_damaged_output_is_recomputed_alone(store: Store):
    run(diamond(), store)
    (store.folder("b", diamond().fingerprints["b"]) / "text").write_text("")
    notes = run(diamond(), store)
    assert notes.ran == ["b"]


def test_force_recomputes_the_listed_stages_from_nothing(store: Store):
    graph = diamond(b={"resumable": True})
    run(graph, store)
    planned = plan(graph, store, force=["b"])
    assert [item.cached for item in planned] == [True, False, True, True, True]
    assert store.finished(planned[1].folder)  # planning touches nothing
    assert run(graph, store, force=("b",)).ran == ["b"]
    assert (planned[1].folder / "attempts").read_text() == "x"


@pytest.mark.parametrize(("resumable", "attempts"), [(True, "xx"), (False, "x")])
def test_a_failure_keeps_what_is_finished_and_only_a_resumable_stage_its_leftovers(store: Store, resumable: bool, attempts: str):
    notes = Notes()
    broken = diamond(c={"config": Config(text="c", fail=True), "resumable": resumable})
    for _ in range(2):
        with pytest.raises(StageFailed, match="^stage c failed: RuntimeError: boom$"):
            execute(plan(broken, store), store, notes, ClusterConfig())
    folder = store.folder("c", broken.fingerprints["c"])
    assert (notes.ran, notes.cached, notes.failed) == (["a", "b"], ["a", "b"], ["c", "c"])
    assert (folder / "attempts").read_text() == attempts
    assert not (folder / MANIFEST).exists()


def test_log_lines_say_where_the_run_is(store: Store, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="pipelines.graph.execute")
    graph = Graph([stage("a"), stage("round1/b", "a")])
    run(graph.until("a"), store)
    caplog.clear()
    run(graph, store)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["[1/2] a: cached (length=1, share=0.25)", "[2/2] round1/b: running"]
    assert lines[2].startswith("[2/2] round1/b: done in 0.") and lines[2].endswith("(length=9, share=0.25)")


def test_a_cached_stage_is_never_imported(store: Store):
    run(Graph([stage("a")]), store)
    assert run(Graph([stage("a", run="no_such_module:run")]), store).cached == ["a"]


WORKER = """
import logging, sys, time
from pathlib import Path
from types import ModuleType
sys.path.insert(0, sys.argv[1])
from test_dag import Notes, Config
from pipelines.graph.dag import Graph, Stage, plan
from pipelines.graph.execute import execute
from pipelines.store import Store
from tasks.stage import ClusterConfig

root, name = Path(sys.argv[2]), sys.argv[3]
logging.basicConfig(level=logging.INFO, filename=root / f"{name}.log", format="%(message)s")

def slow(config, inputs, output, context):
    with (root / "count").open("a") as count:
        count.write(name)
    deadline = time.monotonic() + 30
    while not (root / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return {}

sys.modules["slow"] = ModuleType("slow")
sys.modules["slow"].run = slow
store = Store(root / "store")
execute(plan(Graph([Stage("s", "s", 1, "slow:run", Config())]), store), store, Notes(), ClusterConfig())
"""


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} never held {text!r}"
        time.sleep(0.02)


@pytest.mark.parametrize(("killed", "count"), [(False, "A"), (True, "AB")])
def test_two_processes_compute_a_stage_once_unless_the_first_dies(tmp_path: Path, killed: bool, count: str):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}

    def start(name: str) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", WORKER, str(Path(__file__).parent), str(tmp_path), name], env=environment)

    first = start("A")
    wait_for(tmp_path / "count", "A")
    second = start("B")
    wait_for(tmp_path / "B.log", "waiting for its result")
    if killed:
        first.kill()
        wait_for(tmp_path / "count", "B")
    (tmp_path / "go").touch()
    assert first.wait(30) == (-9 if killed else 0)
    assert second.wait(30) == 0
    assert (tmp_path / "count").read_text() == count
    assert ("s: cached" in (tmp_path / "B.log").read_text()) is not killed
