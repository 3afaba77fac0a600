"""A sweep from outside, of jobs that take a second: six of which two fail, the same again, stopped at the first failure, and in parallel."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.tracking import mlflow_runs
from pipelines.tracking.tracker import sqlite_uri

SIX = ["seed=1,2", "data.max_prompt_tokens=1,256,512"]  # no prompt is as short as one token
FAILING = {0: "job 0 (seed=1 data.max_prompt_tokens=1)", 3: "job 3 (seed=2 data.max_prompt_tokens=1)"}


def sweep(folder: Path, *overrides: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout and the errors."""
    places = [f"paths.outputs={folder}/out", f"paths.store={folder}/store"]
    command = [sys.executable, "-m", "pipelines.full_run", "-m", *overrides, "experiment=smoke", "until=prompts", *places]
    done = subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout, [line for line in done.stderr.splitlines() if line.startswith("error: ")]


def states(folder: Path) -> dict[int, str]:
    """Of the newest sweep."""
    newest = max((folder / "out" / "sweeps").glob("*/*"))
    records = [json.loads(path.read_text()) for path in newest.glob("*/job.json")]
    return {record["number"]: record["state"] for record in sorted(records, key=lambda record: record["number"])}


def check_six(folder: Path, code: int, printed: str, errors: list[str], *, sweeps: int = 1) -> None:
    assert code == 2
    assert sorted(line.split(": data:")[0] for line in errors) == [f"error: {name}" for name in FAILING.values()]
    assert states(folder) == {number: "failed" if number in FAILING else "finished" for number in range(6)}
    assert "sweep:     2 of 6 jobs did not finish" in printed
    client = mlflow_runs.connect(sqlite_uri(folder / "out"))
    (experiment,) = client.search_experiments(filter_string="name = 'jacobi-forcing'")
    runs = client.search_runs([experiment.experiment_id])
    by_kind = {kind: [run for run in runs if run.data.tags["kind"] == kind] for kind in ("sweep", "pipeline", "stage")}
    assert {kind: len(found) for kind, found in by_kind.items()} == {"sweep": sweeps, "pipeline": 6 * sweeps, "stage": 6 * sweeps}
    assert all(run.info.status == "FAILED" and run.data.tags["failed"] == "; ".join(FAILING.values()) for run in by_kind["sweep"])
    parents = {run.info.run_id for run in by_kind["sweep"]}
    assert {run.data.tags["mlflow.parentRunId"] for run in by_kind["pipeline"]} == parents
    assert sorted(run.info.status for run in by_kind["pipeline"]) == ["FAILED"] * 2 * sweeps + ["FINISHED"] * 4 * sweeps


def test_two_of_six_jobs_fail_and_the_others_go_on(tmp_path: Path):
    code, printed, errors = sweep(tmp_path, *SIX)
    check_six(tmp_path, code, printed, errors)
    assert "finished before" not in printed


@pytest.mark.slow
def test_the_same_command_again_does_only_what_is_missing(tmp_path: Path):
    sweep(tmp_path, *SIX)
    code, printed, errors = sweep(tmp_path, *SIX)
    check_six(tmp_path, code, printed, errors, sweeps=2)
    assert len(re.findall(r"prompts: cached", printed)) == 4
    assert "sweep:     4 of 6 jobs were finished before and taken from the store" in printed


def test_fail_fast_starts_no_job_after_a_failure(tmp_path: Path):
    code, printed, errors = sweep(tmp_path, "data.max_prompt_tokens=256,1,512,1024", "fail_fast=true")
    assert (code, len(errors)) == (2, 1)
    assert states(tmp_path) == {0: "finished", 1: "failed", 2: "skipped", 3: "skipped"}
    assert "job 2 (data.max_prompt_tokens=512): not started: fail_fast=true, and job 1 has failed" in printed


@pytest.mark.slow
def test_joblibs_jobs_run_beside_each_other_on_one_store_and_their_failures_reach_the_exit_code(tmp_path: Path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install 'jacobi-forcing[joblib]'")
    code, printed, errors = sweep(tmp_path, *SIX, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    check_six(tmp_path, code, printed, errors)


@pytest.mark.slow
def test_joblibs_jobs_that_want_the_same_stage_compute_it_once(tmp_path: Path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install 'jacobi-forcing[joblib]'")
    code, printed, _ = sweep(tmp_path, "distill.max_steps=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert code == 0
    assert printed.count("prompts: done") == 1 and printed.count("prompts: cached") == 1
