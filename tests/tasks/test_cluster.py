"""What a cluster can never place is refused by arithmetic, what cannot be joined at once; no Ray is started here."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.cluster import passed_on, start_ray, worker_env, worker_mistakes
from tasks.stage import ClusterConfig, UserError


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 4, "num_cpus": 4},  # one CPU stays free
        {"workers": 2, "cpus_per_worker": 2.0, "num_cpus": 4},
        {"workers": 10_000},
    ],
)
def test_more_workers_than_a_local_cluster_places_are_refused_by_name(settings):
    (mistake,) = worker_mistakes(ClusterConfig(**settings))
    assert re.match(rf"cluster\.workers={settings['workers']} needs .* CPUs .*cluster\.num_cpus", mistake)
    assert "\n" not in mistake


@pytest.mark.parametrize("settings", [{}, {"workers": 3, "num_cpus": 4}, {"workers": 6, "cpus_per_worker": 0.5, "num_cpus": 4}])
def test_what_fits_passes(settings):
    assert not list(worker_mistakes(ClusterConfig(**settings)))


def test_an_existing_cluster_and_local_gpus_are_not_guessed():
    assert not list(worker_mistakes(ClusterConfig(workers=100, address="auto")))
    assert not list(worker_mistakes(ClusterConfig(gpus_per_worker=1.0)))


@pytest.mark.parametrize("name", ["workers", "threads_per_worker", "num_cpus"])
def test_counts_below_one_are_refused_by_name(name):
    assert list(worker_mistakes(ClusterConfig(**{name: 0}))) == [f"cluster.{name} must be at least 1, got 0"]


def test_all_that_is_wrong_is_told():
    wrong = ClusterConfig(workers=0, num_cpus=-1, cpus_per_worker=-1.0, gpus_per_worker=-2.0, parallel_stages=0)
    fields = ["parallel_stages", "workers", "num_cpus", "cpus_per_worker", "gpus_per_worker"]
    assert [mistake.split(" ")[0] for mistake in worker_mistakes(wrong)] == [f"cluster.{field}" for field in fields]


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "https://head"])
def test_addresses_of_other_kinds_are_refused_with_what_to_do(address):
    (mistake,) = worker_mistakes(ClusterConfig(address=address))
    assert mistake.startswith(f"cluster.address={address}: ") and "HOST:PORT" in mistake and "ray job submit" in mistake


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no.such.host.invalid:6379", "nonsense"])
def test_where_no_cluster_answers_is_told_at_once(address):
    """Ray alone would try for two minutes, and end this process."""
    with pytest.raises(UserError, match=rf"^cluster\.address={address}: no Ray cluster can be joined there from this machine"):
        start_ray(ClusterConfig(address=address))


def test_what_workers_elsewhere_need_of_the_environment_is_passed_on(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("HF_", "AWS_", "MLFLOW_", "TRANSFORMERS_", "TORCH", "NCCL_"))]:
        monkeypatch.delenv(name)
    theirs = {"HF_HUB_OFFLINE": "1", "AWS_REGION": "eu-1", "MLFLOW_TRACKING_INSECURE_TLS": "true", "https_proxy": "http://proxy:1"}
    ours = {
        "HF_HOME": "/disk/of/mine",
        "HF_TOKEN": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "MLFLOW_TRACKING_PASSWORD": "s",
        "MLFLOW_RUN_ID": "1",
        "EDITOR": "vi",
    }
    for name, value in {**theirs, **ours}.items():
        monkeypatch.setenv(name, value)
    passed = passed_on(ClusterConfig(address="head:6379"))
    assert theirs.items() <= passed.items() and not ours.keys() & passed.keys()
    assert passed_on(ClusterConfig()) == {}  # a local Ray's workers inherit all of it


def having(*nodes: dict[str, float]) -> dict[str, Any]:
    """What Ray says of a cluster of these."""
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    return {"cluster_resources": lambda: total, "nodes": lambda: [{"Alive": True, "Resources": node} for node in nodes]}


def test_a_jobs_own_environment_is_not_contradicted(monkeypatch):
    """Ray refuses a driver that sets what `ray job submit` has set."""
    asked = []
    data = SimpleNamespace(DataContext=SimpleNamespace(get_current=SimpleNamespace))
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **settings: asked.append(settings), data=data, **having({"CPU": 64.0}))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"working_dir": "gcs://x", "env_vars": {"OMP_NUM_THREADS": "8"}}}))
    start_ray(ClusterConfig(address="auto"))
    assert asked[0]["runtime_env"]["env_vars"].keys() >= {"OMP_WAIT_POLICY"} and "OMP_NUM_THREADS" not in asked[0]["runtime_env"]["env_vars"]


@pytest.mark.parametrize(
    ("settings", "resources", "refused"),
    [
        ({"workers": 3, "address": "auto"}, {"CPU": 3.0}, "3 CPU|4 CPUs"),
        ({"workers": 3, "address": "auto"}, {"CPU": 4.0}, None),
        ({"gpus_per_worker": 1.0, "address": "auto"}, {"CPU": 64.0, "GPU": 1.0}, "2 GPUs"),
        ({"gpus_per_worker": 1.0, "address": "auto"}, {"CPU": 64.0}, "2 GPUs"),
        ({"gpus_per_worker": 1.0}, {"CPU": 4.0}, "2 GPUs"),  # a local Ray on a machine without GPU
        ({"gpus_per_worker": 1.0}, {"CPU": 4.0, "GPU": 2.0}, None),
    ],
)
def test_a_running_cluster_is_asked_what_it_has(monkeypatch, settings, resources, refused):
    data = SimpleNamespace(DataContext=SimpleNamespace(get_current=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, data=data, **having(resources)))
    if refused is None:
        start_ray(ClusterConfig(**settings))
    else:
        with pytest.raises(UserError, match=rf"^cluster\.workers=\d+ needs ({refused})"):
            start_ray(ClusterConfig(**settings))


def test_a_worker_that_no_single_node_can_hold_is_refused(monkeypatch):
    """Ray Data and Ray Train would wait for such a node for ever."""
    data = SimpleNamespace(DataContext=SimpleNamespace(get_current=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, data=data, **having({"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0})))
    start_ray(ClusterConfig(workers=2, cpus_per_worker=7.0, address="auto"))
    start_ray(ClusterConfig(workers=1, cpus_per_worker=8.0, gpus_per_worker=2.0, address="auto"))
    with pytest.raises(UserError, match=r"^cluster.cpus_per_worker=9, .*no node of the cluster has as much \(.*: 8 and 0, 8 and 2\)"):
        start_ray(ClusterConfig(workers=1, cpus_per_worker=9.0, address="auto"))


@pytest.mark.parametrize(("address", "joined"), [(None, "local"), ("auto", "auto")])
def test_without_an_address_no_cluster_of_somebody_elses_is_joined(monkeypatch, address, joined):
    """Ray's own default is the last cluster started on the machine."""
    asked = []
    data = SimpleNamespace(DataContext=SimpleNamespace(get_current=SimpleNamespace))
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **settings: asked.append(settings), data=data, **having({"CPU": 64.0}))
    monkeypatch.setitem(sys.modules, "ray", ray)
    start_ray(ClusterConfig(address=address))
    assert [settings["address"] for settings in asked] == [joined]


def test_every_worker_gets_its_threads():
    assert worker_env(ClusterConfig(threads_per_worker=3))["OMP_NUM_THREADS"] == "3"


def test_a_training_asks_for_the_state_of_its_own_cluster_only(monkeypatch):
    def asked(address: str | None) -> str | None:
        return worker_env(ClusterConfig(address=address)).get("RAY_API_SERVER_ADDRESS")

    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    assert (asked("head:6379"), asked("auto")) == ("head:6379", None)
    assert asked(None) == "http://127.0.0.1:9"  # a local Ray answers no such questions
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://head")
    assert asked("head:6379") is None  # its owner knows better, and workers get it as it is


def test_ray_does_not_take_sigterm_from_whoever_handles_it(monkeypatch):
    def ours(signum, frame): ...

    def init(**settings):
        signal.signal(signal.SIGTERM, lambda signum, frame: None)

    data = SimpleNamespace(DataContext=SimpleNamespace(get_current=SimpleNamespace))
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, data=data, **having({"CPU": 64.0}))
    monkeypatch.setitem(sys.modules, "ray", ray)
    before = signal.signal(signal.SIGTERM, ours)
    try:
        start_ray(ClusterConfig())
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
