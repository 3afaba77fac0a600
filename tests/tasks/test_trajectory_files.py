"""Trajectories on disk: what is written is read, however ragged; other versions and damaged rows are refused by name."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.trajectories.record import Trajectory
from tasks.artifacts import write_table
from tasks.stage import UserError
from tasks.trajectory_files import (
    TRAJECTORIES,
    TrajectoryRow,
    read_ids,
    read_metadata,
    read_rows,
    read_trajectories,
    write_trajectories,
)
from tests.tasks.tiny_stage import hand_trajectory, plain

TOKENS = st.one_of(st.integers(0, 3), st.integers(0, 2**31 - 1))  # few different ones, so that noise often equals the fixed point


@st.composite
def trajectory_rows(draw):
    n = draw(st.sampled_from([1, 2, 3, 8, 17, 64]))
    answer = np.array(draw(st.lists(TOKENS, min_size=1, max_size=3 * n)), np.int32)
    states = []
    for start in range(0, len(answer), n):
        fixed = answer[start : start + n]
        noisy = draw(st.lists(st.lists(TOKENS, min_size=len(fixed), max_size=len(fixed)), max_size=5))
        states.append(np.array([*[state for state in noisy if state != fixed.tolist()], fixed], np.int32))
    prompt = np.array(draw(st.lists(TOKENS, min_size=1, max_size=9)), np.int32)
    return TrajectoryRow(draw(st.integers(0, 2**63 - 1)), prompt, answer, draw(st.sampled_from(["eos", "length", "cut"])), n, states)


@settings(max_examples=80, deadline=None)
@given(made=st.lists(trajectory_rows(), max_size=4))
def test_what_is_written_is_read(made, tmp_path_factory):
    """Any states at all, also such as no model gives; no row, one row, several."""
    path = tmp_path_factory.mktemp("parts") / "part-000000.parquet"
    write_trajectories(path, made, metadata={"collect": "all"})
    assert [plain(row) for row in read_rows(path)] == [plain(row) for row in made]
    assert read_ids(path).tolist() == [row.id for row in made]
    assert read_metadata(path) == {"collect": "all"}


def test_torch_and_numpy_give_the_same_file(tmp_path):
    made = hand_trajectory(7, [5, 6, 7, 8, 9], block_size=4, unconverged=[[4, 2, 0], [1, 0]])
    write_trajectories(tmp_path / "part-000000.parquet", [made])
    (row,) = read_rows(tmp_path / "part-000000.parquet")
    write_trajectories(tmp_path / "again.parquet", [row])
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "part-000000.parquet").read_bytes()
    (back,) = read_trajectories(tmp_path)
    assert isinstance(back, Trajectory) and back.states[0].dtype == torch.long
    back.validate()
    assert plain(back) == plain(made)


def test_plain_pyarrow_reads_it(tmp_path):
    """docs/schemas.md says how to rebuild a state by hand."""
    write_trajectories(tmp_path / "a.parquet", [hand_trajectory(7, [5, 6, 7, 8, 9], block_size=4, unconverged=[[4, 2, 0], [1, 0]])])
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.equals(TRAJECTORIES) and table.schema.metadata[b"schema_version"] == b"2"
    assert table.to_pylist() == [
        {
            "id": 7,
            "prompt_ids": [30, 31],
            "answer_ids": [5, 6, 7, 8, 9],
            "stop_reason": "eos",
            "block_size": 4,
            "block_states": [2, 1],
            "state_converged": [0, 2, 0],
            "state_tokens": [1, 1, 1, 1, 1, 1, 1],
        }
    ]


def test_no_state_is_stored_twice(tmp_path):
    made = [hand_trajectory(i, list(range(100, 164)), block_size=16, unconverged=[list(range(16, -1, -1))] * 4) for i in range(50)]
    write_trajectories(tmp_path / "a.parquet", made)
    assert sum(len(x) for x in pq.read_table(tmp_path / "a.parquet")["state_tokens"]) == 50 * 4 * sum(range(17))


def test_the_first_schema_is_refused_with_its_version(tmp_path):
    old = pa.schema([("id", pa.int64())], metadata={"artifact": "trajectories", "schema_version": "1"})
    write_table(tmp_path / "part-000000.parquet", pa.Table.from_pylist([{"id": 1}], schema=old))
    with pytest.raises(UserError, match="part-000000.parquet: holds trajectories version 1, expected trajectories version 2"):
        list(read_trajectories(tmp_path))


@pytest.mark.parametrize("column", ["block_states", "state_converged", "state_tokens"])
def test_a_damaged_row_is_named(tmp_path, column):
    path = tmp_path / "part-000000.parquet"
    write_trajectories(path, [hand_trajectory(7, [5, 6, 7, 8, 9], block_size=4, unconverged=[[4, 2, 0], [1, 0]])])
    (row,) = pq.read_table(path).to_pylist()
    row[column] = row[column][:-1]
    write_table(path, pa.Table.from_pylist([row], schema=TRAJECTORIES))
    with pytest.raises(UserError, match=r"part-000000.parquet: prompt id 7 is damaged .*; recompute"):
        list(read_rows(path))


def test_writing_and_reading_rows_needs_no_torch():
    code = "import sys, tasks.trajectory_files, tasks.generate_trajectories.stage, tasks.generate_trajectories.worker; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
