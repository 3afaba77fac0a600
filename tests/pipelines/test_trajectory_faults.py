"""The fault benchmark in small: three drivers and three workers killed, and a run of many shards killed half-way. The stub it uses is exact."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks import trajectory_faults
from benchmarks.stub_trajectories import StubCollector, digest, read_digests, stub_trajectory, write_stub_prompts
from tasks import trajectory_files
from tasks.artifacts import PromptRows


def test_a_stub_trajectory_is_a_function_of_its_id_with_growing_prefixes():
    made = stub_trajectory(5, [1, 2, 3])
    assert digest(made) == digest(stub_trajectory(5, [1, 2, 3])) != digest(stub_trajectory(6, [1, 2, 3]))
    for identity in range(200):
        t = stub_trajectory(identity, [1])
        assert len(t.states) == -(-len(t.answer_ids) // t.block_size)
        for i, states in enumerate(t.states):
            fixed = t.answer_ids[i * t.block_size : (i + 1) * t.block_size]
            prefixes = np.cumprod(states == fixed, 1).sum(1)
            assert (np.diff(prefixes) > 0).all() and prefixes[-1] == len(fixed)


def test_a_digest_sees_every_field():
    made = stub_trajectory(5, [1, 2, 3])
    states = [*made.states[:-1], np.roll(made.states[-1], 1)]
    for change in ({"id": 6}, {"prompt_ids": np.array([1, 2])}, {"stop_reason": "length"}, {"block_size": 8}, {"states": states}):
        assert digest(dataclasses.replace(made, **change)) != digest(made)
    moved = dataclasses.replace(made, prompt_ids=made.prompt_ids[:-1], answer_ids=np.append(made.prompt_ids[-1:], made.answer_ids))
    assert digest(moved) != digest(made)  # a token on the other side of a border


def test_digests_are_read_back_and_a_doubled_row_is_an_error(tmp_path):
    write_stub_prompts(tmp_path / "prompts", 20)
    prompts = PromptRows(tmp_path / "prompts", "train").read(range(20))
    made = StubCollector()(prompts).trajectories
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 0), made[:12])
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 1), made[12:])
    assert read_digests(tmp_path) == {t.id: digest(t) for t in made} and len(made) == 20
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 1), made[11:])
    with pytest.raises(ValueError, match=f"prompt id {made[11].id} stands twice"):
        read_digests(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_drivers_and_workers_leave_the_exact_set(tmp_path):
    assert trajectory_faults.kills(tmp_path, driver=3, worker=3, rows=200) == {
        "driver_kills_exact": 3,
        "driver_kills": 3,
        "worker_kills_exact": 3,
        "worker_kills": 3,
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_half_way_loses_and_doubles_nothing(tmp_path):
    values = trajectory_faults.soak(tmp_path, rows=4000, workers=2, shard_size=40)
    assert (values["soak_lost_rows"], values["soak_doubled_rows"], values["soak_files"]) == (0, 0, 100)
    assert values["soak_driver_mb"] < 1500
