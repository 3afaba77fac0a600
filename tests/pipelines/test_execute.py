"""Which stages run at the same time, and what a failure leaves: stages given to Ray run in threads here (on a real one: test_parallel_run)."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipelines.graph import execute as execution
from pipelines.graph.dag import Graph, Stage, plan
from pipelines.graph.execute import StageFailed, execute
from pipelines.graph.room import Needs, Room, as_ray_work, threads
from pipelines.graph.timings import Timings
from pipelines.store import Store
from tasks.remote import Ran, Stopped, WorkerLost
from tasks.stage import ClusterConfig
from tests.pipelines.test_dag import Notes

PATIENCE = 60  # seconds until a test that waits for another stage fails
log = logging.getLogger(__name__)


@dataclass
class Config:
    text: str
    beside: str = ""  # id of a stage that must be running meanwhile
    fail: bool = False
    waits: bool = False  # until the run is stopped
    dies: int = 0  # times that its machine is lost


class Machines:
    """Stands in for Ray: every stage in a thread of the driver's, one that was told to stop ends with Stopped."""

    def __init__(self, cpus: float) -> None:
        self.room, self.now, self.most = Room(cpus, 0), set(), 0
        self.order: list[str] = []
        self.together: set[frozenset[str]] = set()
        self.change = threading.Condition()
        self.lost: dict[str, int] = {}

    def run_on_ray(self, call, *, stop, label, **asked) -> Ran:
        return self.work(call.config, call.inputs, call.output, stop)

    def run_here(self, call) -> Ran:
        return self.work(call.config, call.inputs, call.output, threading.Event())

    def met(self, *names: str) -> bool:
        return any(set(names) <= together for together in self.together)

    def work(self, config: Config, inputs, output: Path, stop: threading.Event) -> Ran:
        with self.change:
            self.order.append(config.text)
            self.now.add(config.text)
            self.together.add(frozenset(self.now))
            self.most = max(self.most, len(self.now))
            self.change.notify_all()
            try:
                if config.beside:
                    assert self.change.wait_for(lambda: self.met(config.text, config.beside), PATIENCE), f"{config.text} ran without {config.beside}"
                if config.waits:
                    (output / "kept").write_text("")
                    deadline = time.monotonic() + PATIENCE
                    while not stop.is_set():
                        assert time.monotonic() < deadline, "was not told to stop"
                        self.change.wait(0.02)
                    raise Stopped
                if self.lost.setdefault(config.text, 0) < config.dies:
                    self.lost[config.text] += 1
                    raise WorkerLost("the node died")
                if config.fail:
                    raise RuntimeError(f"{config.text} broke")
                self.change.wait(0.02)
            finally:
                self.now.discard(config.text)
        (output / "text").write_text("".join((inputs[name] / "text").read_text() for name in sorted(inputs)) + config.text)
        return Ran({"length": len(config.text)}, 0.5, 0.25)


def stage(name: str, *upstream: str, needs: Needs | None = None, resumable: bool = False, **changes) -> Stage:
    inputs = {f"input{i}": source for i, source in enumerate(upstream)}
    return Stage(name, "work", 1, "nowhere:run", Config(name, **changes), inputs, needs=needs or Needs(), resumable=resumable)


@pytest.fixture
def machines(monkeypatch) -> Machines:
    found = Machines(cpus=4)
    monkeypatch.setattr(execution, "run_on_ray", found.run_on_ray)
    monkeypatch.setattr(execution, "run_here", found.run_here)
    monkeypatch.setattr(execution._Execution, "_ray", lambda self: setattr(self, "room", found.room) or found.room)
    return found


def run(graph: Graph, folder: Path, **settings) -> tuple[Notes, dict, Timings]:
    store, notes, timings = Store(folder / "store"), Notes(), Timings()
    cluster = settings.pop("cluster", ClusterConfig(parallel_stages=8))
    try:
        manifests = execute(plan(graph, store), store, notes, cluster, timings=timings, **settings)
    finally:
        notes.finished = [item.id for item in graph.stages if store.finished(store.folder(item.kind, graph.fingerprints[item.id]))]
    return notes, manifests, timings


def branches(**changes: Needs) -> Graph:
    """Two rounds with a branch beside the second, as the method has."""
    stages = [
        stage("base"),
        stage("trajectories1", "base"),
        stage("trajectories2", "trajectories1", beside="cllm"),
        stage("cllm", "trajectories1", beside="trajectories2"),
        stage("report", "trajectories2", "cllm"),
    ]
    return Graph(replace(item, needs=changes.get(item.id, item.needs)) for item in stages)


def test_independent_stages_run_at_the_same_time_and_end_in_the_same_store(machines: Machines, tmp_path: Path):
    _, manifests, _ = run(branches(), tmp_path / "parallel")
    assert list(manifests) == ["base", "trajectories1", "trajectories2", "cllm", "report"]  # the plan's order, whoever ended first
    assert machines.most == 2

    machines.most = 0
    plain = [replace(item, config=replace(item.config, beside="")) for item in branches().stages]
    texts = []
    for folder, parallel in (("one", 1), ("many", 8)):
        run(Graph(plain), tmp_path / folder, cluster=ClusterConfig(parallel_stages=parallel))
        texts.append({path.parent.name: path.read_text() for path in (tmp_path / folder).glob("store/*/text")})
    assert len(texts[0]) == 5
    assert texts[0] == texts[1]


def test_what_the_cluster_cannot_hold_beside_another_waits(machines: Machines, tmp_path: Path):
    graph = Graph([stage("wide", needs=Needs(cpus=3), beside="narrow"), stage("wider", needs=Needs(cpus=4)), stage("narrow", beside="wide")])
    run(graph, tmp_path)
    assert machines.met("wide", "narrow")
    assert all(len(names) == 1 for names in machines.together if "wider" in names)


def test_a_limit_is_kept(machines: Machines, tmp_path: Path):
    run(Graph([stage("a", beside="b"), stage("b", beside="a"), stage("c"), stage("d")]), tmp_path, cluster=ClusterConfig(parallel_stages=2))
    assert machines.most == 2


def test_what_the_whole_cluster_cannot_hold_runs_here(machines: Machines, tmp_path: Path):
    notes, _, _ = run(Graph([stage("huge", needs=Needs(cpus=64)), stage("small"), stage("other")]), tmp_path)
    assert all(len(names) == 1 for names in machines.together if "huge" in names)
    assert sorted(notes.ran) == ["huge", "other", "small"]


def test_what_no_single_machine_can_hold_runs_here(machines: Machines, tmp_path: Path, monkeypatch):
    """Ray would wait for such a machine for ever."""
    machines.room = Room(8, 0, ((4, 0), (4, 0)))
    here, work = [], machines.run_here
    monkeypatch.setattr(execution, "run_here", lambda call: here.append(call.config.text) or work(call))
    run(Graph([stage("wide", needs=Needs(cpus=6)), stage("spread", needs=Needs(cpus=7, spread=True)), stage("small")]), tmp_path)
    assert here == ["wide"]


def test_a_timed_stage_has_the_machine_for_itself_and_comes_after_what_is_ready(machines: Machines, tmp_path: Path):
    graph = Graph([stage("a"), stage("speed", "a", needs=Needs.timed()), stage("b", "a"), stage("c", "a"), stage("d", "b")])
    run(graph, tmp_path)
    assert all(len(names) == 1 for names in machines.together if "speed" in names)
    assert machines.order.index("speed") > max(machines.order.index("b"), machines.order.index("c"))


def test_a_timed_stage_waits_for_all_nodes_of_a_cluster_and_for_no_room_on_them(machines: Machines, tmp_path: Path):
    """It is not given to Ray, which might have no node for it while others run: it begins when nothing of the run is running."""
    machines.room = Room(12, 0, ((4, 0), (4, 0), (4, 0)))
    spread = Needs(cpus=9, spread=True)
    graph = Graph(
        [
            *(stage("a"), stage("speed", "a", needs=Needs.timed()), stage("wide", "a", needs=spread, beside="b"), stage("b", "a", beside="wide")),
            *(stage("latency", "wide", needs=Needs.timed()), stage("end", "speed", "latency", "b", needs=Needs(cpus=64))),
        ]
    )
    cluster = ClusterConfig(address="head:6379")
    assert sorted(run(graph, tmp_path, cluster=cluster)[0].ran) == ["a", "b", "end", "latency", "speed", "wide"]
    assert all(len(names) == 1 for names in machines.together if names & {"speed", "latency"})


def test_without_room_all_runs_in_this_process_in_order(machines: Machines, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(execution._Execution, "_ray", lambda self: pytest.fail("Ray was started"))
    run(Graph([stage("a"), stage("b"), stage("c")]), tmp_path, cluster=ClusterConfig(parallel_stages=1))
    assert machines.order == ["a", "b", "c"]
    assert machines.most == 1


def test_equal_work_under_two_ids_is_done_once_and_waits_for_no_lock_of_its_own(machines: Machines, tmp_path: Path):
    twin = replace(stage("a"), id="b")
    notes, _, _ = run(Graph([stage("a"), twin, stage("c", "b")]), tmp_path)
    assert (notes.ran, notes.cached) == (["a", "c"], ["b"])


def test_the_first_failure_ends_the_run_and_stops_what_runs_beside_it(machines: Machines, tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    graph = Graph(
        [stage("long", waits=True, resumable=True), stage("broken", fail=True, beside="long"), stage("never", "broken"), stage("last", "long")]
    )
    with pytest.raises(StageFailed, match="^stage broken failed: RuntimeError: broken broke$") as error:
        run(graph, tmp_path)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert sorted(machines.order) == ["broken", "long"]
    assert len(list(tmp_path.glob("store/*/kept"))) == 1  # for a resumable stage to go on from
    assert "not run: never, last" in caplog.messages


@pytest.mark.parametrize("parallel", [1, 8])
def test_keep_going_runs_all_that_does_not_need_what_failed(machines: Machines, tmp_path: Path, parallel: int):
    graph = Graph([stage("x", fail=True), stage("y", "x"), stage("z", fail=True), stage("a"), stage("b", "a"), stage("end", "y", "b")])
    with pytest.raises(StageFailed) as error:
        run(graph, tmp_path, keep_going=True, cluster=ClusterConfig(parallel_stages=parallel))
    assert set(error.value.failures) == {"x", "z"}
    assert str(error.value).count(" failed: RuntimeError") == 2
    assert sorted(machines.order) == ["a", "b", "x", "z"]


def test_a_stage_whose_machine_dies_starts_again_and_not_for_ever(machines: Machines, tmp_path: Path):
    graph = Graph([stage("a", dies=2), stage("b")])
    assert sorted(run(graph, tmp_path)[0].ran) == ["a", "b"]
    with pytest.raises(StageFailed, match="stage c failed: WorkerLost: the node died"):
        run(Graph([stage("c", dies=99), stage("d")]), tmp_path)
    assert machines.order.count("c") == execution.ATTEMPTS


def test_a_stop_from_outside_stops_what_runs_and_starts_nothing(machines: Machines, tmp_path: Path, monkeypatch):
    def told(self, planned, result):
        raise SystemExit(143)  # as SIGTERM does, while the main thread waits for a stage

    noted = execution._Execution._note
    calls = iter([told, *[noted] * 9])
    monkeypatch.setattr(
        execution._Execution, "_note", lambda self, *ended: next(calls)(self, *ended) if ended[0].stage.id == "a" else noted(self, *ended)
    )
    graph = Graph([stage("a"), stage("long", waits=True), stage("never", "a")])
    with pytest.raises(SystemExit):
        run(graph, tmp_path)
    assert sorted(machines.order) == ["a", "long"]
    assert not machines.now


def test_a_thread_that_waits_for_another_run_does_not_hold_up_a_failure(machines: Machines, tmp_path: Path):
    graph = Graph([stage("theirs"), stage("broken", fail=True)])
    other = Store(tmp_path / "store")
    with other.claim(graph.fingerprints["theirs"]), pytest.raises(StageFailed, match="^stage broken failed"):
        run(graph, tmp_path)


def test_every_second_of_a_stage_is_its_own_the_start_ups_or_ours(machines: Machines, tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    _, _, timings = run(Graph([stage("a")]), tmp_path, cluster=ClusterConfig())
    _, _, again = run(Graph([stage("a")]), tmp_path, cluster=ClusterConfig())
    took, cached = timings.stages["a"], again.stages["a"]
    assert (took.cached, took.useful, took.start_up) == (False, 0.5, 0.25)
    assert (cached.cached, cached.useful, cached.start_up) == (True, 0, 0)
    assert 0 < cached.ours < 5
    assert any("a: done in 0.8 s, 0.2 s start-up, 0." in text and " ours (length=1)" in text for text in caplog.messages)
    record = timings.record()
    assert record["run"]["useful"] == 0.5 and set(record["stages"]) == {"a"}
    assert 0 < record["run"]["ours_share"] < 1
    assert timings.table().splitlines()[1].split() == ["a", "0.5", "0.2", f"{took.ours:.1f}"]


def test_needs_follow_from_the_cluster():
    cpus = ClusterConfig(workers=3, cpus_per_worker=2.0)
    gpus = ClusterConfig(workers=8, cpus_per_worker=4.0, gpus_per_worker=1.0)
    assert Needs.workers(cpus) == Needs(cpus=7, gpus=0, spread=True)
    assert Needs.workers(gpus) == Needs(cpus=33, gpus=8, spread=True)
    assert Needs.computing(cpus) == Needs(cpus=threads(), gpus=0)
    assert Needs.computing(gpus) == Needs(cpus=1, gpus=1)
    assert Room(8, 2).less([Needs(cpus=3, gpus=1)]) == Room(5, 1)
    apart = Room(8, 1, ((6, 0), (2, 1)))
    assert apart.holds(Needs(cpus=6)) and apart.holds(Needs(cpus=2, gpus=1)) and apart.holds(Needs(cpus=8, gpus=1, spread=True))
    assert not apart.holds(Needs(cpus=4, gpus=1)) and not apart.less([Needs(cpus=3)]).holds(Needs(cpus=6))


@pytest.mark.parametrize(
    ("cluster", "cores", "needs", "expected"),
    [
        ({}, 2, [Needs(cpus=3), Needs()], False),  # a laptop: Ray's 4 logical CPUs are no room
        ({}, 2, [Needs(), Needs()], False),  # nor is it worth a Ray of its own
        ({"num_cpus": 64}, 64, [Needs(cpus=9, spread=True), Needs()], True),
        ({"num_cpus": 64}, 64, [Needs(cpus=64, spread=True), Needs()], False),
        ({"num_cpus": 8, "parallel_stages": 2}, 2, [Needs(cpus=3), Needs()], True),
        ({"num_cpus": 64, "parallel_stages": 1}, 64, [Needs(cpus=9), Needs()], False),
        ({"num_cpus": 64}, 64, [Needs(cpus=9, spread=True), Needs.timed()], False),  # one stage has nothing to run beside
        ({"address": "auto"}, 2, [Needs(cpus=9)], True),
        ({"address": "auto"}, 2, [Needs(here=True)], False),
    ],
)
def test_ray_runs_stages_only_where_there_is_room(monkeypatch, cluster, cores, needs, expected):
    monkeypatch.setattr("pipelines.graph.room.cores", lambda: cores)
    assert as_ray_work(ClusterConfig(**cluster), needs) is expected
