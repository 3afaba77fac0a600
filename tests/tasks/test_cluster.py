"""What a cluster can never place is refused by arithmetic; no Ray is started here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tasks.cluster import check_workers, start_ray, worker_env
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
    with pytest.raises(UserError, match=rf"^cluster\.workers={settings['workers']} needs .* CPUs .*cluster\.num_cpus") as error:
        check_workers(ClusterConfig(**settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{}, {"workers": 3, "num_cpus": 4}, {"workers": 6, "cpus_per_worker": 0.5, "num_cpus": 4}])
def test_what_fits_passes(settings):
    check_workers(ClusterConfig(**settings))


def test_an_existing_cluster_and_local_gpus_are_not_guessed():
    check_workers(ClusterConfig(workers=100, address="auto"))
    check_workers(ClusterConfig(gpus_per_worker=1.0))


@pytest.mark.parametrize("name", ["workers", "threads_per_worker", "num_cpus"])
def test_counts_below_one_are_refused_by_name(name):
    with pytest.raises(UserError, match=rf"^cluster\.{name} must be at least 1, got 0"):
        check_workers(ClusterConfig(**{name: 0}))


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
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: resources))
    if refused is None:
        start_ray(ClusterConfig(**settings))
    else:
        with pytest.raises(UserError, match=rf"^cluster\.workers=\d+ needs ({refused})"):
            start_ray(ClusterConfig(**settings))


@pytest.mark.parametrize(("address", "joined"), [(None, "local"), ("auto", "auto")])
def test_without_an_address_no_cluster_of_somebody_elses_is_joined(monkeypatch, address, joined):
    """Ray's own default is the last cluster started on the machine."""
    asked = []
    data = SimpleNamespace(DataContext=SimpleNamespace(get_current=SimpleNamespace))
    ray = SimpleNamespace(
        is_initialized=lambda: False, init=lambda **settings: asked.append(settings), data=data, cluster_resources=lambda: {"CPU": 64.0}
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    start_ray(ClusterConfig(address=address))
    assert [settings["address"] for settings in asked] == [joined]


def test_every_worker_gets_its_threads():
    assert worker_env(ClusterConfig(threads_per_worker=3))["OMP_NUM_THREADS"] == "3"
