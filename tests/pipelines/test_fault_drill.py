"""What the fault drill counts; the drill itself takes an hour (benchmarks/faults.py)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks.fault_cluster import ONE_PER_CLUSTER, sorted_out
from benchmarks.faults import FAULTS, PER_ROUND, Round, plan, report


def test_rays_own_actors_are_told_from_orphans_and_a_second_one_is_an_orphan():
    padded = "ray::ActorLocationTracker" + 80 * " "
    left = [
        padded,
        "ray::_StatsActor.update_execution_metrics",
        "ray::PlacementGroupCleaner",
        "ray::_work",
        "ray::_StatsActor",
        "ray::StatsActorOfOurs",
    ]
    orphans, kept = sorted_out(left)
    assert kept == ["ActorLocationTracker", "_StatsActor"]
    assert orphans == ["ray::PlacementGroupCleaner", "ray::_work", "ray::_StatsActor", "ray::StatsActorOfOurs"]


@pytest.mark.parametrize("actor", ONE_PER_CLUSTER)
def test_the_installed_ray_has_one_of_them_per_cluster(actor: str):
    """By its source: asked for by name, found if it exists, outliving whoever asked."""
    (root,) = importlib.util.find_spec("ray").submodule_search_locations
    call = re.compile(rf"\b{actor}\b(?:\n\s*)?\)?\.options\((?P<options>[^()]*(?:\([^()]*\)[^()]*)*)\)")
    made = [found["options"] for file in Path(root, "data", "_internal").rglob("*.py") for found in call.finditer(file.read_text(encoding="utf-8"))]
    assert made
    for options in made:
        assert "name=" in options and "get_if_exists=True" in options and 'lifetime="detached"' in options


def test_the_report_counts_orphans_and_the_most_that_a_cluster_kept():
    found = [
        Round(0, 7, faults=[{"kind": "driver", "at": 3.0}], equal=True, orphans=["ray::_work"], ray_actors_left=["_StatsActor"]),
        Round(1, 7, faults=[{"kind": "disk", "hit": "nothing: the run was over"}], errors=["error: x"], ray_actors_left=[*ONE_PER_CLUSTER]),
    ]
    values = report(found)
    assert (values["orphans"], values["ray_actors_left"], values["rounds_equal_share"], values["reruns"]) == (1, 3, 0.5, 1)
    assert (values["faults_driver"], values["faults_disk"]) == (1, 0)


def test_every_kind_of_fault_is_as_frequent_and_a_seed_says_when():
    rounds = [plan(number, 5, list(FAULTS), 100.0) for number in range(len(FAULTS))]
    assert rounds == [plan(number, 5, list(FAULTS), 100.0) for number in range(len(FAULTS))]
    kinds = [kind for entry in rounds for _, kind in entry]
    assert all(kinds.count(kind) == PER_ROUND for kind in FAULTS)
    assert all(entry == sorted(entry) and all(0 <= moment <= 100 for moment, _ in entry) for entry in rounds)
