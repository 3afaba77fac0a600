"""The whole pipeline on real Ray, from outside, in a folder that is not the repository: what it leaves behind, twice, swept and killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from pipelines.store import MANIFEST
from pipelines.tracking import mlflow_runs
from pipelines.tracking.tracker import sqlite_uri
from tasks.report import ROW_KEYS

pytestmark = pytest.mark.timeout(900)
MODELS = ["base", "round1", "round2", "cllm"]
KEYS = {"schema_version", "experiment", "git_sha", "hardware", "final_model", "rows"}


def command(folder: Path, *overrides: str) -> list[str]:
    places = [f"paths.outputs={folder}/out", f"paths.store={folder}/store", f"paths.results={folder}/copy/results.json"]
    return [sys.executable, "-m", "pipelines.full_run", *overrides, "experiment=smoke", *places]


def full_run(folder: Path, *overrides: str, **environment: str) -> str:
    """Its stdout."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(command(folder, *overrides), cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def recorded(folder: Path) -> tuple[MlflowClient, list]:
    client = mlflow_runs.connect(sqlite_uri(folder / "out"))
    return client, client.search_runs([client.get_experiment_by_name("jacobi-forcing").experiment_id])


def of_kind(runs: list, kind: str) -> list:
    return [run for run in runs if run.data.tags["kind"] == kind]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder where every stage has run, and what was printed."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, full_run(folder, "baselines=[cllm]")


def test_results_obey_the_contract(finished: tuple[Path, str]):
    folder, printed = finished
    label, _, path = printed.splitlines()[-1].partition(" ")
    assert label == "results:"
    results = json.loads(Path(path.strip()).read_text())
    assert results == json.loads((folder / "copy" / "results.json").read_text())
    assert results.keys() >= KEYS
    (timed,) = results["timed_on"]
    assert timed["models"] == MODELS and timed["machine"]["cpu"] == results["hardware"]["cpu"]
    assert (results["schema_version"], results["experiment"]) == (1, "smoke")
    assert (Path(results["final_model"]) / "model.safetensors").is_file()
    assert json.loads((Path(results["final_model"]) / "jacobi_forcing.json").read_text())["name"] == "round2"
    assert (folder / "out" / "models" / "smoke").resolve() == Path(results["final_model"])
    rows = results["rows"]
    assert all(row.keys() >= ROW_KEYS for row in rows)
    alone = [
        ("ar", 1, 1),
        *((method, block, 1) for method in ("jacobi", "mr") for block in (8, 64)),
        ("prompt_lookup", 11, 1),
        ("transformers", 1, 1),
    ]
    kinds = [*alone, *((method, block, 2) for method, block, _ in alone if method != "prompt_lookup")]
    assert [(row["model"], row["method"], row["block_size"], row["batch_size"]) for row in rows] == [
        (model, *kind) for model in MODELS for kind in kinds
    ]
    for row in rows:
        assert row["tpf"] == pytest.approx(row["tokens"] / row["forwards"])
        assert row["tps"] == pytest.approx(row["tokens"] / row["seconds"])
        assert (row["prompts"], row["accuracy_prompts"]) == (3, 8)
        assert row["equals_ar"] == 1.0
        if row["method"] == "ar":
            assert (row["tpf"], row["speedup"]) == (1.0, 1.0)
    trained = {row["model"]: row["train_tokens"] for row in rows}
    assert trained["base"] == 0 < trained["round1"] < trained["round2"] <= trained["cllm"]


def test_the_page_and_the_table_are_beside_the_results(finished: tuple[Path, str]):
    folder, printed = finished
    output = Path(printed.splitlines()[-1].partition(" ")[2].strip()).parent
    assert output.is_relative_to(folder / "out" / "runs")
    page = (output / "report.html").read_text()
    client, runs = recorded(folder)
    stages = {run.data.tags["stage"]: run.info.run_id for run in of_kind(runs, "stage")}
    for stage in ("prompts", "round2/distill", "cllm/speed"):
        assert f'<a href="http://127.0.0.1:5000/#/runs/{stages[stage]}">{stage}</a>' in page
    for title in ("A block&#x27;s trajectory, collected for round2", "Losses", "Tokens committed by every forward of one answer"):
        assert f"<h3>{title}</h3><figure>" in page, title
    (pipeline,) = (run for run in of_kind(runs, "pipeline") if run.data.tags.get("mlflow.parentRunId") is None)
    logged = {Path(item.path).stem for item in client.list_artifacts(pipeline.info.run_id, "report/figures")}
    assert {"losses", "packed", "mask", "trajectory_round1", "trajectory_round2", "accepted_minicode"} <= logged
    assert "cllm" in (output / "results.md").read_text()
    assert "mlflow ui --backend-store-uri" in printed
    assert "[27/27] report: done" in (output / "full_run.log").read_text()


def test_mlflow_shows_the_pipeline_its_stages_and_their_curves(finished: tuple[Path, str]):
    client, runs = recorded(finished[0])
    (pipeline,) = (run for run in of_kind(runs, "pipeline") if run.data.tags.get("mlflow.parentRunId") is None)
    stages = {run.data.tags["stage"]: run for run in of_kind(runs, "stage") if run.data.tags["mlflow.parentRunId"] == pipeline.info.run_id}
    assert len(stages) == 27
    assert {run.info.status for run in runs} == {"FINISHED"}
    for model in MODELS[1:]:
        curve = client.get_metric_history(stages[f"{model}/distill"].info.run_id, "distill/loss")
        assert len({point.step for point in curve}) >= 3, model
    assert {item.path for item in client.list_artifacts(pipeline.info.run_id)} == {"config.yaml", "report", "timings.json"}


def test_a_second_run_finds_everything_and_starts_no_ray(finished: tuple[Path, str], tmp_path: Path):
    folder, first = finished
    started = time.monotonic()
    printed = full_run(folder, "baselines=[cllm]", RAY_TMPDIR=str(tmp_path / "ray"))
    assert time.monotonic() - started < 30
    assert len(re.findall(r"\[\d+/27\] \S+: cached", printed)) == 27
    assert ": running" not in printed
    assert not (tmp_path / "ray").exists()
    results = [json.loads(Path(text.splitlines()[-1].partition(" ")[2].strip()).read_text()) for text in (first, printed)]
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_sweep_over_schedules_and_masks_trains_each_and_generates_trajectories_once(tmp_path: Path):
    cells = ["noise_schedule=linear,random,reverse", "distill.mask=nc,nc_ic"]
    # with a window of 2, linear has one clean and one noisy block in it, and both masks are the same
    printed = full_run(tmp_path, "-m", *cells, "rounds.0.window=3", "until=round1/distill")
    assert printed.count("round1/trajectories: running") == 1
    assert printed.count("round1/trajectories: cached") == 5
    assert (printed.count("round1/pack: running"), printed.count("round1/pack: cached")) == (3, 3)
    trained = [json.loads(path.read_text()) for path in tmp_path.glob("store/distill-*/training.json")]
    assert len({tuple(point["consistency"] for point in training["curves"]) for training in trained}) == 6
    assert len({training["train_tokens"] for training in trained}) == 1  # rows are as long under every schedule
    assert all(training["curves"][-1]["loss"] < training["curves"][0]["loss"] for training in trained)
    _, runs = recorded(tmp_path)
    (sweep,) = of_kind(runs, "sweep")
    pipelines = of_kind(runs, "pipeline")
    assert len(pipelines) == 6
    assert {run.data.tags["mlflow.parentRunId"] for run in pipelines} == {sweep.info.run_id}
    assert {run.data.params["noise_schedule"] for run in pipelines} == {"linear", "random", "reverse"}
    parents = [run.data.tags["mlflow.parentRunId"] for run in of_kind(runs, "stage")]
    assert sorted(parents) == sorted([run.info.run_id for run in pipelines] * 5)
    assert {run.info.status for run in runs} == {"FINISHED"}


def kill_when(condition: Callable[[], bool], folder: Path, *overrides: str) -> None:
    """Starts a run and, as soon as the condition holds, SIGKILLs the driver's process group; everything it started must be gone then."""
    with (folder / "killed.log").open("a") as log:
        driver = subprocess.Popen(command(folder, *overrides), cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 400
        while not condition():
            assert driver.poll() is None, f"ended before it could be killed; see {folder}/killed.log"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert any("raylet" in process.name() for process in family)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def unfinished(folder: Path, kind: str) -> list[Path]:
    return [found for found in folder.glob(f"store/{kind}-*") if not (found / MANIFEST).exists()]


def timeless(folder: Path) -> dict:
    results = json.loads((folder / "copy" / "results.json").read_text())
    results["rows"] = [{key: row[key] for key in ROW_KEYS - {"seconds", "tps", "speedup"}} for row in results["rows"]]
    results["final_model"] = Path(results["final_model"]).name
    return results


def weights(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in folder.glob("store/export-*/model.safetensors")}


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_same_bytes(tmp_path: Path):
    settings = ["trajectories.shard_size=4", "distill.epochs=100", "rounds.0.max_steps=30", "rounds.1.max_steps=4"]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    killed.mkdir()

    kill_when(lambda: any(list(stage.glob("part-*.parquet")) for stage in unfinished(killed, "trajectories")), killed, *settings)
    (stage,) = unfinished(killed, "trajectories")
    parts = {part: part.stat().st_mtime_ns for part in stage.glob("part-*.parquet")}
    assert 1 <= len(parts) < 16

    # a checkpoint is committed when the next one begins
    kill_when(lambda: any(len(list(stage.glob("ray/train/checkpoint_*"))) > 1 for stage in unfinished(killed, "distill")), killed, *settings)
    assert {part: part.stat().st_mtime_ns for part in parts} == parts
    before = {path: path.stat().st_mtime_ns for path in killed.glob(f"store/*/{MANIFEST}")}

    printed = full_run(killed, *settings)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert int(re.search(r"distill: step (\d+)/30", printed)[1]) > 2  # went on from a checkpoint
    assert re.findall(r"\] (\S+): running", printed)[0] == "round1/distill"
    _, runs = recorded(killed)
    assert sorted(run.info.status for run in of_kind(runs, "pipeline")) == ["FINISHED", "KILLED", "KILLED"]
    assert "RUNNING" not in {run.info.status for run in runs}

    full_run(undisturbed, *settings)
    assert len(weights(undisturbed)) == 2
    assert weights(killed) == weights(undisturbed)
    assert timeless(killed) == timeless(undisturbed)
