"""What the report is given of large stages: a typical block, honest about what is not there, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tasks import artifacts
from tasks.completion_files import Completion, part_file, write_completions
from tasks.excerpts import MOST_POSITIONS, ExcerptsConfig, run
from tasks.stage import StageContext
from tasks.trajectory_files import TrajectoryRow, trajectory_part, write_trajectories

FIXED = [5, 6, 7, 8]


def states(*blocks: list[list[int]]) -> TrajectoryRow:
    """An answer of blocks of four, each given by its states; the last one is its fixed point."""
    answer = np.array([token for block in blocks for token in block[-1]])
    return TrajectoryRow(7, np.array([1, 2]), answer, "eos", 4, [np.array(block) for block in blocks])


SLOW = [[0, 0, 0, 0], [5, 0, 0, 0], [5, 6, 0, 0], [5, 6, 7, 0], FIXED]
PLAIN = [[0, 0, 0, 0], [5, 0, 0, 0], FIXED]
EARLY = [[0, 6, 7, 8], [5, 0, 7, 8], FIXED]  # as many forwards, more of it right before its time


def excerpts(folder: Path, **stages: Path) -> dict:
    output = folder / "out"
    output.mkdir()
    inputs = {f"stage/{name.replace('__', '/')}": path for name, path in {"prompts": folder, **stages}.items()}
    run(ExcerptsConfig(), inputs, output, StageContext())
    return json.loads((output / "excerpts.json").read_text())


def stage(folder: Path, *rows: TrajectoryRow, **metadata: str) -> Path:
    folder.mkdir()
    write_trajectories(trajectory_part(folder, 0), rows, metadata=metadata)
    return folder


def test_a_typical_block_is_chosen_and_of_these_the_one_that_shows_most(tmp_path: Path):
    folder = stage(tmp_path / "t", states(SLOW, PLAIN, [[0, 0], [5, 6]]), states(EARLY))
    (found,) = excerpts(tmp_path, round1__trajectories=folder)["trajectories"]
    assert found.pop("states") == EARLY
    assert found == {"round": "round1", "prompt_id": 7, "answers": 2, "blocks": 3, "block": 0, "block_size": 4, "forwards": 2}


def test_a_wide_block_is_cut_and_ends_where_nothing_kept_changes_any_more(tmp_path: Path):
    n = 2 * MOST_POSITIONS
    fixed = list(range(100, 100 + n))
    block = [[0] * n, fixed[:MOST_POSITIONS] + [0] * MOST_POSITIONS, [*fixed[:-1], 0], fixed]
    row = TrajectoryRow(7, np.array([1]), np.array(fixed), "eos", n, [np.array(block)])
    (found,) = excerpts(tmp_path, round1__trajectories=stage(tmp_path / "t", row))["trajectories"]
    assert found["states"] == [[0] * MOST_POSITIONS, fixed[:MOST_POSITIONS]] and found["forwards"] == 3


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder.mkdir(), "holds no trajectory"),
        (lambda folder: stage(folder), "holds no trajectory"),
        (lambda folder: stage(folder, states(PLAIN), collect="schedule"), "only the state that its noise schedule asks for"),
        (lambda folder: (folder.mkdir(), (folder / "part-000000.parquet").write_bytes(b"x")), "It cannot be shown: .*part-000000.parquet"),
    ],
)
def test_what_is_not_there_is_a_sentence(tmp_path: Path, make, said: str):
    make(tmp_path / "t")
    found = excerpts(tmp_path, round1__trajectories=tmp_path / "t", round1__pack=tmp_path / "t", base__speed=tmp_path / "t")
    ((trajectory,), (packed,)) = found["trajectories"], found["packed"]
    assert trajectory.keys() == packed.keys() == {"round", "missing"}
    assert re.search(said, trajectory["missing"])
    assert packed["missing"].startswith("It cannot be shown: ")
    assert (found["decoded"], found["texts"], found["stages"]) == ([], None, [])


def test_rounds_are_ordered_by_number_and_one_prompt_is_followed_through_all_settings(tmp_path: Path):
    rounds = {f"round{k}__trajectories": stage(tmp_path / f"r{k}", states(PLAIN)) for k in (10, 2)}
    speed = tmp_path / "speed"
    speed.mkdir()
    asked = [(3, "ar", 1, 1, [1, 1]), (3, "jacobi", 8, 1, [2]), (4, "jacobi", 8, 1, [1, 1]), (3, "jacobi", 8, 4, [2])]
    timed = [Completion(i, method, block, size, 0, 4, [7], "", "eos", len(n), n, 1.0, 0.1) for i, method, block, size, n in asked]
    write_completions(part_file(speed, "speed", 0), timed, metadata={})
    found = excerpts(tmp_path, **rounds, base__speed=speed, base__gsm8k__speed=speed)
    assert [part["round"] for part in found["trajectories"]] == ["round2", "round10"]
    assert [(d["model"], d["method"], d["prompt_id"], d["accepted_lengths"]) for d in found["decoded"]] == [
        ("base", "ar", 3, [1, 1]),
        ("base", "jacobi", 3, [2]),
    ]


def test_what_stages_took_is_told_under_their_ids_in_this_run(tmp_path: Path):
    manifest = {"stage": "a/pack", "kind": "pack", "version": 2, "fingerprint": "f", "config": {"seed": 0}, "metrics": {"rows": 3}}
    manifest |= {"started": "2026-01-01T00:00:00+00:00", "seconds": 2.5, "mlflow_run_id": "ab", "git_sha": "c0ffee", "files": {"x": 1}}
    (tmp_path / "pack-f").mkdir()
    artifacts.write_json(tmp_path / "pack-f" / "manifest.json", manifest)
    (fact,) = excerpts(tmp_path, cllm__pack=tmp_path / "pack-f")["stages"]
    assert fact.pop("folder") == "pack-f" and "files" not in fact
    assert fact == {name: value for name, value in manifest.items() if name != "files"} | {"stage": "cllm/pack"}


def test_import_and_run_are_light(tmp_path: Path):
    stage(tmp_path / "t", states(PLAIN))
    check = (
        "import sys; from pathlib import Path; from tasks.excerpts import *; from tasks.stage import StageContext; folder = Path(sys.argv[1]); "
        "run(ExcerptsConfig(), {'stage/prompts': folder, 'stage/round1/trajectories': folder / 't'}, folder, StageContext()); "
        "assert not {'torch', 'transformers', 'plotly', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check, str(tmp_path)], check=True)
