"""The trajectories stage on a real Ray Data plan, with collectors that go wrong: what is lost, what is said, what a second start gives."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from tasks import artifacts
from tasks.artifacts import Prompt
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
from tasks.generate_trajectories.stage import run
from tasks.stage import ClusterConfig, StageContext, UserError
from tasks.trajectory_files import read_rows, trajectory_part, trajectory_parts
from tests.tasks.faulty_collectors import BLOCK_SIZE, Faulty, trajectory_of
from tests.tasks.tiny_stage import plain

pytestmark = pytest.mark.slow

PROMPTS = [Prompt(identity, "train", [], [5, 6, 7], {}) for identity in range(1, 101)]


@pytest.fixture(scope="module", autouse=True)
def session():
    yield
    import ray

    ray.shutdown()


@pytest.fixture
def stage(tmp_path):
    """run(collector, **settings) -> metrics; the output is tmp_path / "out"."""
    (tmp_path / "prompts").mkdir()
    artifacts.write_prompts(tmp_path / "prompts", PROMPTS)
    (tmp_path / "out").mkdir()

    def start(collector, *, cluster=None, report=None, **settings):
        config = GenerateTrajectoriesConfig(**{"block_size": BLOCK_SIZE, "shard_size": 9, **settings})  # the last of 12 shards has one row
        context = StageContext(cluster=cluster or ClusterConfig(num_cpus=8), **({"report": report} if report else {}))
        return run(config, {"prompts": tmp_path / "prompts", "model": tmp_path}, tmp_path / "out", context, make_collector=collector)

    return start


def rows(folder):
    return sorted(plain(row) for part in trajectory_parts(folder) for row in read_rows(part))


EXPECTED = sorted(plain(trajectory_of(prompt)) for prompt in PROMPTS)


def test_every_row_once_for_any_number_of_workers(stage, tmp_path):
    reports = []
    metrics = stage(
        Faulty(seconds=0.6), cluster=ClusterConfig(num_cpus=8, workers=3, min_workers=1), report=lambda m, step: reports.append((step, m))
    )
    assert (metrics["trajectories"], metrics["quarantined"]) == (100, 0)
    assert rows(tmp_path / "out") == EXPECTED
    assert [step for step, _ in reports] == sorted({step for step, _ in reports}) and reports[-1][0] == 12
    assert reports[-1][1]["trajectories/rows"] == 100 and reports[-1][1]["trajectories/answer_tokens_per_s"] > 0
    assert reports[-1][1]["trajectories/seconds_left"] == 0
    before = {part.name: part.read_bytes() for part in trajectory_parts(tmp_path / "out")}
    for part in trajectory_parts(tmp_path / "out"):
        part.unlink()
    assert stage(Faulty(), cluster=ClusterConfig(num_cpus=8, workers=1)) == metrics
    assert {part.name: part.read_bytes() for part in trajectory_parts(tmp_path / "out")} == before


def test_one_poison_row_costs_one_row_and_gets_another_chance(stage, tmp_path):
    metrics = stage(Faulty(raises=True, at=77))
    assert (metrics["trajectories"], metrics["quarantined"]) == (99, 1)
    (failure,) = artifacts.read_json(tmp_path / "out" / "quarantine-000008.json")
    assert failure == {"id": 77, "error": "ValueError: this prompt is poison"}
    assert rows(tmp_path / "out") == [row for row in EXPECTED if row[0] != 77]
    assert stage(Faulty())["quarantined"] == 0
    assert rows(tmp_path / "out") == EXPECTED


def test_too_many_bad_rows_stop_the_stage_early(stage, tmp_path):
    with pytest.raises(UserError, match="of 100 prompts failed, more than trajectories.max_bad_share=0.01; the first: id .*poison"):
        stage(Faulty(raises=True, seconds=0.2), shard_size=2)
    assert len(list((tmp_path / "out").glob("quarantine-*"))) < 40


@pytest.mark.parametrize("fault", ["dies", "dies_at_start"])
def test_an_actor_that_dies_once_is_replaced(stage, tmp_path, fault):
    metrics = stage(Faulty(**{fault: True}, once=tmp_path / "died"))
    assert (tmp_path / "died").exists()
    assert (metrics["trajectories"], metrics["quarantined"]) == (100, 0)
    assert rows(tmp_path / "out") == EXPECTED
    assert not list((tmp_path / "out").glob(".attempt-*"))


@pytest.mark.parametrize(("fault", "what"), [("dies", r"shard 6 .*"), ("dies_at_start", "starting a worker ")])
def test_an_actor_that_always_dies_fails_the_stage(stage, tmp_path, fault, what):
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"^trajectories: {what}ended its process 3 times \(out of memory\?"):
        stage(Faulty(**{fault: True}, at=55))
    assert time.monotonic() - started < 60
    assert stage(Faulty())["trajectories"] == 100  # attempts of an earlier start do not count


def test_a_stall_is_reported_and_ends(stage, tmp_path, caplog):
    with pytest.raises(UserError, match=r"no shard was finished in \d+ s \(trajectories.stall_timeout=12\); the cluster has .*CPU"):
        stage(Faulty(hangs=True, at=99), stall_timeout=12)
    assert "is a worker stuck" in caplog.text
    assert stage(Faulty())["trajectories"] == 100
    assert rows(tmp_path / "out") == EXPECTED


def test_killed_workers_lose_nothing(stage, tmp_path):
    """SIGKILL of whatever worker is at work, five times."""
    killed = []

    def kill():
        while len(killed) < 5 and not trajectory_part(tmp_path / "out", 11).exists():
            time.sleep(0.7)
            actors = [p for p in psutil.Process().children(recursive=True) if "MapWorker" in "".join(p.cmdline())]
            if actors:
                killed.append(actors[0].pid)
                os.kill(actors[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    metrics = stage(Faulty(seconds=0.5))
    thread.join()
    assert killed and (metrics["trajectories"], metrics["quarantined"]) == (100, 0)
    assert rows(tmp_path / "out") == EXPECTED


def test_a_node_that_goes_away_loses_nothing(stage, tmp_path):
    """Two Ray nodes on this machine; the one that is no driver's is removed while both work."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    second = cluster.add_node(num_cpus=2)
    try:
        removed = threading.Event()

        def remove():
            while len(trajectory_parts(tmp_path / "out")) < 4:
                time.sleep(0.05)
            cluster.remove_node(second, allow_graceful=False)
            removed.set()

        thread = threading.Thread(target=remove, daemon=True)
        thread.start()
        # a worker takes all but one CPU of a node, so that each node has one
        config = ClusterConfig(address=cluster.address, workers=2, min_workers=1, cpus_per_worker=2)
        metrics = stage(Faulty(seconds=0.7), cluster=config, stall_timeout=120)
        assert removed.is_set()
        assert (metrics["trajectories"], metrics["quarantined"]) == (100, 0)
        assert rows(tmp_path / "out") == EXPECTED
    finally:
        ray.shutdown()
        cluster.shutdown()
