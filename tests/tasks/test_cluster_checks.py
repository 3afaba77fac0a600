"""What a node says of itself and what is made of it; no Ray is started here (test_cluster_nodes.py asks real ones)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks import cluster_checks
from tasks.cluster_checks import PACKAGES, SOURCES, check_cluster, check_own_gpus, looking
from tasks.stage import ClusterConfig, UserError

EXISTING = ClusterConfig(address="head:6379")


@pytest.fixture
def asking(monkeypatch):
    """What the nodes answer, as changes to what an equal one would."""
    answers: dict[str, dict] = {}

    def ask(look, arguments):
        probe, *rest = arguments
        found = {}
        for name, change in answers.items():
            if "says nothing" in change:
                continue
            facts = dict(look(change.get("sees", probe), name, *rest))
            for key, value in change.items():
                facts[key] = {**facts[key], **value} if isinstance(value, dict) else value
            found[f"node {name}"] = facts
        return found, [f"cluster: node {name}: no answer" for name, change in answers.items() if "says nothing" in change]

    monkeypatch.setattr(cluster_checks, "start_ray", lambda cluster: None)
    monkeypatch.setattr(cluster_checks, "_ask_all_nodes", ask)
    monkeypatch.setattr(cluster_checks, "SHARE_SECONDS", 0.3)
    return answers


def told(folder: Path, **arguments) -> list[str]:
    with pytest.raises(UserError) as error:
        check_cluster(EXISTING, folder=folder, setting="paths.store", **arguments)
    return str(error.value).splitlines()


def test_equal_nodes_pass_and_leave_nothing_behind(asking, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    here = looking()(None, "here", SOURCES, PACKAGES, (), (), 0.0)
    gpu_build = here["versions"]["torch"].partition("+")[0] + "+cu128"  # is no other version
    asking |= {"a": {}, "b": {"versions": {"torch": gpu_build}}}
    with caplog.at_level("INFO"):
        check_cluster(EXISTING, folder=tmp_path / "store", setting="paths.store", modules=["json"])
    assert "cluster: 2 nodes checked" in caplog.text
    assert list((tmp_path / "store").iterdir()) == []


def test_every_difference_of_every_node_is_told_at_once(asking, tmp_path: Path):
    asking["a"] = {"versions": {"torch": "1.0", "ray": None}, "sources": {"tasks": "0" * 64, "pipelines": None}}
    asking["b"] = {"versions": {"python": "3.10.1"}, "sees": str(tmp_path / "elsewhere" / "probe")}
    lines = told(tmp_path, modules=["no_such_module_of_mine"])
    assert lines[0].startswith("cluster: node a: other versions than here: torch 1.0 (here 2.")
    assert "ray missing (here 2." in lines[0] and lines[0].endswith("; install the same on every node")
    assert lines[1].startswith("cluster: node a: pipelines cannot be imported and tasks is another version of the source; start with `ray job submit")
    assert lines[2].startswith("noise_schedule: no_such_module_of_mine cannot be imported on node a; put it into")
    assert lines[3].startswith("cluster: node b: other versions than here: python 3.10.1 (here ")
    assert lines[4].startswith("noise_schedule: no_such_module_of_mine cannot be imported on node b")
    assert lines[5].startswith(f"paths.store={tmp_path}: not shared with node b (No such file or directory): what this process writes there")
    assert lines[5].endswith("or leave those nodes out") and len(lines) == 6


def test_a_silent_node_hides_nothing_of_the_others(asking, tmp_path: Path):
    asking |= {"a": {"says nothing": True}, "b": {"versions": {"torch": "1.0"}}}
    lines = told(tmp_path)
    assert lines[0] == "cluster: node a: no answer" and len(lines) == 2
    assert lines[1].startswith("cluster: node b: other versions than here: torch 1.0 (here 2.")


def test_of_nodes_that_cannot_answer_each_is_told_beside_what_the_others_say(monkeypatch: pytest.MonkeyPatch):
    import ray

    nodes = [{"Alive": True, "NodeID": i * 8, "NodeManagerHostname": i, "NodeManagerAddress": "10.0.0.1"} for i in ("silent", "broken", "well")]

    def get(task):
        if task == "broken" * 8:
            raise ray.exceptions.RayError("no such interpreter")
        return {"node": task}

    def task_of(look):
        return SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda probe, identity, *rest: identity))

    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "remote", lambda **given: task_of)
    monkeypatch.setattr(ray, "wait", lambda asked, **given: (asked[1:], asked[:1]))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr("ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy", lambda identity, soft: None)
    answers, mistakes = cluster_checks._ask_all_nodes(None, ("probe", "more"))
    assert answers == {"node well (10.0.0.1, wellwell)": {"node": "well" * 8}}
    assert mistakes == [
        "cluster: node silent (10.0.0.1, silentsi): no answer in 180 s; look at `ray status`, and take out or restart the node",
        "cluster: node broken (10.0.0.1, brokenbr): cannot run work of this project (no such interpreter)",
    ]


def test_what_a_node_writes_must_arrive_here(asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk that is mounted there read from a snapshot, say."""
    asking["a"] = {"node": "whose file is not there"}
    (line,) = told(tmp_path)
    assert line.startswith(f"paths.store={tmp_path}: what node a writes there does not arrive here; put paths.store on a disk")


def test_a_folder_that_cannot_be_written(asking, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    (line,) = told(tmp_path / "file" / "store")
    assert line.startswith(f"paths.store={tmp_path}/file/store: cannot write there (")


def test_credentials_are_asked_for_where_they_are_missing(asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    asking |= {"a": {"unset": ["MLFLOW_TRACKING_TOKEN"]}, "b": {}}
    check_cluster(EXISTING, folder=tmp_path, setting="paths.store")
    assert "node a: MLFLOW_TRACKING_TOKEN is set here and not there" in caplog.text
    assert "node b" not in caplog.text and "secret" not in caplog.text


def test_a_node_without_this_project_can_say_so(tmp_path: Path):
    """What is sent to it is code, not the name of a module that it would have to import."""
    import ray.cloudpickle

    (tmp_path / "look").write_bytes(ray.cloudpickle.dumps(looking()))
    code = (
        "import pickle, sys; sys.path[:] = [p for p in sys.path if 'site-packages' in p or 'lib/python' in p]; "
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; import ray.cloudpickle; "
        "look = pickle.load(open(sys.argv[1], 'rb')); print(look(None, 'n', ['tasks'], ['ray', 'no-such-package'], ['tasks'], ['HOME'], 0.0))"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "look")]
    done = subprocess.run(command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = eval(done.stdout)
    assert said["sources"] == {"tasks": None} and said["modules"] == ["tasks"] and said["unset"] == []
    assert said["versions"]["no-such-package"] is None and said["versions"]["ray"]


def test_a_machine_without_gpus_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster_checks, "gpus_here", lambda: 1)
    check_own_gpus(ClusterConfig())
    check_own_gpus(ClusterConfig(workers=2, gpus_per_worker=0.5))
    with pytest.raises(
        UserError, match=r"^cluster\.workers=2 needs 2 GPUs \(cluster\.gpus_per_worker=1\), this machine has 1: lower cluster\.workers"
    ):
        check_own_gpus(ClusterConfig(workers=2, gpus_per_worker=1.0))
    monkeypatch.setattr(cluster_checks, "gpus_here", lambda: None)
    check_own_gpus(ClusterConfig(workers=2, gpus_per_worker=1.0))


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0,1,3", 3), ("GPU-ab", 1), ("0,-1,1", 1)])
def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, visible: str, count: int):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cluster_checks.gpus_here() in (count, None)
