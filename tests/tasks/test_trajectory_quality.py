"""Answers that break a quality rule leave the set under one reason each; what stays is what it was without rules. No Ray here."""

from __future__ import annotations

import dataclasses

import pytest

from jacobi_core.trajectories.quality import REASONS, QualityRules
from tasks import artifacts
from tasks.generate_trajectories import plan
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
from tasks.generate_trajectories.stage import make_job, run
from tasks.generate_trajectories.worker import ShardWorker, part_counts, read_dropped
from tasks.stage import StageContext, UserError
from tasks.trajectory_files import read_trajectories, trajectory_part
from tests.tasks.faulty_collectors import Collected, trajectory_of
from tests.tasks.tiny_stage import collect_shards, plain, write_split


def settings(**quality) -> GenerateTrajectoriesConfig:
    return GenerateTrajectoriesConfig(block_size=4, max_new_tokens=18, shard_size=4, dtype="float64", quality=QualityRules(**quality))


@pytest.fixture
def in_process(monkeypatch):
    """run() collects its open shards in this process."""
    monkeypatch.setattr(plan, "run_shards", lambda job, todo, context, **_: [ShardWorker(job)({"shard": [i]}) for i in todo])


@pytest.fixture
def train(prompts_folder):
    return artifacts.read_prompts(prompts_folder, "train")


@pytest.fixture
def whole(tmp_path, stage_inputs):
    """Prompt id -> trajectory, without a rule."""
    collect_shards(settings(loop_tokens=None, min_tokens=0), stage_inputs, tmp_path / "whole", range(3))
    return {t.id: t for t in read_trajectories(tmp_path / "whole")}


def dropped_in(folder) -> dict[int, str]:
    return {i: reason for shard in range(3) for i, reason in read_dropped(folder, shard).items()}


@pytest.mark.parametrize(
    ("rules", "reason", "bad"),
    [
        ({"require_eos": True}, "no_eos", lambda t: t.stop_reason != "eos"),
        ({"min_tokens": 6}, "empty", lambda t: len(t.answer_ids) - (t.stop_reason == "eos") < 6),
    ],
)
def test_what_a_rule_finds_is_dropped_and_the_rest_is_as_before(tmp_path, stage_inputs, in_process, whole, rules, reason, bad):
    output = tmp_path / "out"
    output.mkdir()
    metrics = run(settings(**{"loop_tokens": None} | rules), stage_inputs, output, StageContext())
    expected = {i: reason for i, t in whole.items() if bad(t)}
    assert 0 < len(expected) < 11, "the tiny model no longer gives both kinds"
    assert dropped_in(output) == expected
    assert {t.id: plain(t) for t in read_trajectories(output)} == {i: plain(t) for i, t in whole.items() if i not in expected}
    assert {r: metrics[f"dropped_{r}"] for r in REASONS} == {r: len(expected) if r == reason else 0 for r in REASONS}
    assert (metrics["prompts"], metrics["trajectories"], metrics["quarantined"]) == (11, 11 - len(expected), 0)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    assert run(settings(**{"loop_tokens": None} | rules), stage_inputs, output, StageContext()) == metrics  # nothing left to do
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_prompts_whose_tests_fail_are_never_decoded(tmp_path, train, base_folder, in_process, whole):
    scores = {p.id: score for p, score in zip(train, [0.5, 1.0, None, 0.9] * 3, strict=False)}
    rows = [dataclasses.replace(p, meta=p.meta | ({} if scores[p.id] is None else {"test_score": scores[p.id]})) for p in train]
    rows[0] = dataclasses.replace(rows[0], input_ids=[])  # would fail if it were decoded
    inputs = {"prompts": write_split(tmp_path / "prompts", rows), "model": base_folder}
    (tmp_path / "out").mkdir()
    metrics = run(settings(min_test_score=0.9, loop_tokens=None), inputs, tmp_path / "out", StageContext())
    failed = {i for i, score in scores.items() if score == 0.5}
    assert dropped_in(tmp_path / "out") == dict.fromkeys(failed, "failed_tests") and metrics["dropped_failed_tests"] == len(failed) == 3
    assert {t.id: plain(t) for t in read_trajectories(tmp_path / "out")} == {i: plain(t) for i, t in whole.items() if i not in failed}


def test_nothing_left_is_an_error_naming_the_reasons(tmp_path, stage_inputs, in_process):
    (tmp_path / "out").mkdir()
    with pytest.raises(
        UserError, match=r"^trajectories\.quality: no answer is left, 11 of 11 were dropped \(failed_tests 0, empty 11, no_eos 0, loop 0\)"
    ):
        run(settings(min_tokens=1000), stage_inputs, tmp_path / "out", StageContext())


class DropsAndFails:
    """Drops the first prompt it is ever given and fails at the second, while `broken`. Counts what it is asked."""

    def __init__(self, prompts) -> None:
        self.first, self.second, self.broken = prompts[0].id, prompts[1].id, True
        self.asked: list[int] = []

    def __call__(self, prompts):
        if self.broken and any(p.id == self.second for p in prompts):
            raise RuntimeError("out of memory")
        self.asked += [p.id for p in prompts]
        dropped = {p.id: "loop" for p in prompts if p.id == self.first}
        return Collected([trajectory_of(p) for p in prompts if p.id not in dropped], 1, dropped)


def test_a_second_try_of_a_quarantined_row_leaves_dropped_ones_dropped(tmp_path, stage_inputs, train):
    collector = DropsAndFails(train)
    job, _ = make_job(settings(), stage_inputs, tmp_path, StageContext(), make_collector=lambda: collector)
    counts = ShardWorker(job)({"shard": [0]})
    assert [counts[name] for name in ("trajectories", "dropped_loop", "quarantined")] == [[2], [1], [1]]
    collector.broken, collector.asked = False, []
    ShardWorker(job)({"shard": [0]})
    assert collector.asked == [train[1].id]
    counts = part_counts(trajectory_part(tmp_path, 0))
    assert [counts[name] for name in ("trajectories", "dropped_loop", "quarantined")] == [3, 1, 0]
    assert read_dropped(tmp_path, 0) == {train[0].id: "loop"}


def test_what_a_killed_attempt_dropped_does_not_count(tmp_path, stage_inputs, in_process):
    artifacts.write_json(tmp_path / "dropped-000001.json", [{"id": 1, "reason": "loop"}])  # its part was never written
    metrics = run(settings(loop_tokens=None), stage_inputs, tmp_path, StageContext())
    assert metrics["trajectories"] == 11 and not list(tmp_path.glob("dropped-*"))
