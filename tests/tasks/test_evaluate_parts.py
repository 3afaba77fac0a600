"""What is decoded once and what again: after a restart, on another machine, by Ray's actors, for another score."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from jacobi_core.decoding import greedy_batch as greedy_module
from tasks import artifacts
from tasks.completion_files import COMPLETIONS, Completion, part_file, read_completions, read_metadata, write_completions
from tasks.evaluate.answers import AnswerJob, AnswerWorker
from tasks.evaluate.speed import WARM_UP
from tasks.evaluate.stage import decode_answers, score, time_decoders
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.stage import ClusterConfig, StageContext, UserError
from tests.tasks.tiny_evaluation import SAME, evaluate, settings


def test_a_restart_goes_on_from_the_parts_that_are_there(tmp_path, stage_inputs, test_prompts, calls, monkeypatch):
    whole = evaluate(settings(part_size=2, speed_prompts=5, speed_part=2), stage_inputs, tmp_path / "whole")
    assert sorted(p.name for p in (tmp_path / "whole").glob("*.parquet")) == [
        *[f"answers-00000{i}.parquet" for i in range(3)],
        *[f"speed-00000{i}.parquet" for i in range(3)],
    ]
    original, answered = greedy_module.greedy_batch, []

    def counted(model, prompts, **more):
        answered.append(len(prompts))
        return original(model, prompts, **more)

    monkeypatch.setattr(greedy_module, "greedy_batch", counted)
    output = tmp_path / "halfway"
    shutil.copytree(tmp_path / "whole", output)
    for lost in (part_file(output, "answers", 1), part_file(output, "speed", 2), output / "evaluation.json", output / "answers.json"):
        lost.unlink()
    calls.clear()
    again = evaluate(settings(part_size=2, speed_prompts=5, speed_part=2), stage_inputs, output)
    assert answered == [2]
    assert [p for p, *_ in calls[WARM_UP * 3 :]] == [test_prompts[4].id] * 3  # after the warm-up
    assert again[2] == whole[2]
    for a, b in zip(whole[1]["rows"], again[1]["rows"], strict=True):
        assert {k: a[k] for k in SAME} == {k: b[k] for k in SAME}


def test_times_of_another_machine_are_taken_again(tmp_path, stage_inputs, test_prompts, calls, monkeypatch):
    config, output = settings(speed_prompts=5, speed_part=2), tmp_path / "out"
    _, evaluation, _ = evaluate(config, stage_inputs, output)
    machine = evaluation["machine"]
    assert machine == read_metadata(part_file(output, "speed", 2))["machine"]
    assert (machine["device"], machine["torch_threads"], machine["cores"]) == ("cpu", torch.get_num_threads(), len(os.sched_getaffinity(0)))
    moved = part_file(output, "speed", 1)
    write_completions(moved, read_table_rows(moved), metadata={"machine": {**machine, "torch_threads": 99}})
    with pytest.raises(UserError, match="several machines"):
        score(config, {**stage_inputs, "answers": output, "speed": output}, output, StageContext())
    calls.clear()
    time_decoders(config, stage_inputs, output, StageContext())
    assert {p for p, *_ in calls[WARM_UP * 3 :]} == {p.id for p in test_prompts[2:4]}
    assert read_metadata(moved)["machine"] == machine
    calls.clear()
    monkeypatch.setattr("jacobi_core.hub.load_model", None)
    time_decoders(config, stage_inputs, output, StageContext())  # nothing is left: no model is loaded
    assert not calls


def read_table_rows(file):
    return [Completion(**row) for row in artifacts.read_table(file, COMPLETIONS).to_pylist()]


def test_a_local_ray_is_ended_before_anything_is_timed(tmp_path, stage_inputs, calls, monkeypatch):
    ended = []
    ray = SimpleNamespace(is_initialized=lambda: True, shutdown=lambda: ended.append(len(calls)))
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name, address in (("here", None), ("there", "auto")):
        (tmp_path / name).mkdir()
        time_decoders(settings(), stage_inputs, tmp_path / name, StageContext(cluster=ClusterConfig(address=address)))
    assert ended == [0]  # and an existing cluster never


def test_answers_are_scored_again_without_the_model(tmp_path, stage_inputs, monkeypatch):
    metrics, evaluation, answers = evaluate(settings(), stage_inputs, tmp_path / "out")
    monkeypatch.setattr("jacobi_core.hub.load_model", None)
    again = tmp_path / "again"
    again.mkdir()
    config = settings(sandbox=SandboxConfig(allow_code_execution=True, timeout_s=5))
    assert score(config, {**stage_inputs, "answers": tmp_path / "out", "speed": tmp_path / "out"}, again, StageContext()) == metrics
    assert artifacts.read_json(again / "evaluation.json") == evaluation and artifacts.read_json(again / "answers.json") == answers
    assert sorted(p.name for p in again.iterdir()) == ["answers.json", "evaluation.json", "samples-evalplus.jsonl", "samples-human_eval.jsonl"]


def test_a_worker_writes_what_this_process_would(tmp_path, stage_inputs):
    config = settings(part_size=2)
    evaluate(config, stage_inputs, tmp_path / "here")
    (tmp_path / "there").mkdir()
    job = pickle.loads(pickle.dumps(AnswerJob(config, stage_inputs["prompts"], stage_inputs["model"], tmp_path / "there", False, 5)))
    worker = AnswerWorker(job)
    assert job.missing() == [0, 1, 2]
    assert worker({"part": [2]}) == {"part": [2], "answers": [1]} and worker({"part": [0]}) == {"part": [0], "answers": [2]}
    assert job.missing() == [1]
    worker({"part": [1]})
    assert list(read_completions(tmp_path / "there", "answers")) == list(read_completions(tmp_path / "here", "answers"))


@pytest.mark.slow
def test_answers_by_ray_actors(tmp_path, stage_inputs):
    here = evaluate(settings(part_size=2), stage_inputs, tmp_path / "here")
    there = evaluate(settings(part_size=2, distributed=True), stage_inputs, tmp_path / "there")
    assert there[2] == here[2] and there[0]["accuracy"] == here[0]["accuracy"]
    assert [(r["method"], r["tokens"], r["forwards"]) for r in there[1]["rows"]] == [
        (r["method"], r["tokens"], r["forwards"]) for r in here[1]["rows"]
    ]


def test_no_ray_and_no_model_where_nothing_is_left_to_answer(tmp_path, stage_inputs, monkeypatch):
    evaluate(settings(), stage_inputs, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("jacobi_core.hub.load_model", None)
    decode_answers(settings(), stage_inputs, tmp_path / "out", StageContext())
    decode_answers(settings(distributed=True), stage_inputs, tmp_path / "out", StageContext())
