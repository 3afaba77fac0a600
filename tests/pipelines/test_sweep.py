"""What a sweep ends in, from hand-made results: jobs that finished, failed or were killed, and what is said about them."""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient

from pipelines import sweep_jobs
from pipelines.job_record import JobRecord
from pipelines.sweep import FILES, SweepTable, write_sweep
from pipelines.tracking import mlflow_runs
from pipelines.tracking.settings import TrackingConfig
from pipelines.tracking.tracker import SweepInfo, Tracker, sqlite_uri
from tasks.completion_files import Completion, write_completions
from tests.results import ar_row, row, trained_row

NOISE = {"edges": [i / 10 for i in range(11)], "counts": [4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8], "mean": 0.66}


def write_job(
    sweep: Path, number: int, kind: str, window: int, *, rows: list | None = None, state: str = "finished", error: str | None = None
) -> None:
    folder, pack = sweep / str(number), sweep.parent / "store" / f"pack-{number}"
    folder.mkdir(parents=True)
    config = {"noise_schedule": kind, "rounds": [{"block_size": 8, "window": window, "noise_schedule": None}], "distill": {"mask": "nc"}}
    config["paths"] = {"store": str(sweep.parent / "store")}
    overrides = ["experiment=ablate_noise", f"noise_schedule={kind}", f"rounds.0.window={window}"]
    speed = sweep.parent / "store" / f"speed-{number}"
    JobRecord(
        folder, number, overrides, config, {"prompts": "x", "round1/pack": str(pack), "round1/speed": str(speed)}, state=state, error=error
    ).save()
    if rows is not None:
        write_speed(speed)
        (folder / "results.json").write_text(json.dumps({"rows": rows}))
        pack.mkdir(parents=True)
        (pack / "noise.json").write_text(json.dumps({k: NOISE[k] for k in ("edges", "counts")} | {"by_window_position": []}))
        (pack / "manifest.json").write_text(json.dumps({"metrics": {"noise_ratio_mean": NOISE["mean"]}}))


def write_speed(folder: Path, *, forwards: int = 20) -> None:
    """Ten prompts at block size 64, five of which took 20 more forwards, and the same in batches, which count for nothing here."""
    folder.mkdir(parents=True)
    timed = [
        Completion(i, "jacobi", 64, size, i, 4, [7] * 60, "", "eos", forwards + 20 * (i % 2), [], 1.0, 0.1, False)
        for size in (1, 16)
        for i in range(10)
    ]
    write_completions(folder / "speed-00000.parquet", timed, metadata={})


def results(tpf: float) -> list[dict]:
    trained = [trained_row("round1", block, tpf + block / 100) for block in (16, 64)]
    return [ar_row(), row(), ar_row(model="round1", train_tokens=1_500_000), *trained]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    write_job(folder, 0, "linear", 8, rows=results(2.0))
    write_job(folder, 1, "reverse", 8, rows=results(1.5))
    write_job(folder, 2, "random", 4, state="failed", error="stage round1/distill failed: no <memory>")
    return folder


def test_the_table_has_every_job_its_settings_and_the_papers_numbers(sweep: Path, capsys):
    assert write_sweep(sweep, paper="table4")
    base, linear, reverse, failed = json.loads((sweep / "sweep.json").read_text())["rows"]
    assert (base["number"], base["best_tpf"], base["trained_model"]) == (None, 1.0, "base")
    assert linear["settings"] == {"noise_schedule": "linear", "rounds.0.window": "8"}
    assert linear["tpf"] == {"jacobi@16": 2.16, "jacobi@64": 2.64}
    assert (linear["best_tpf"], linear["best_tpf_block"], linear["best_speedup_block"]) == (2.64, 64, 64)
    assert linear["common_setting"] == base["common_setting"] == "jacobi@64" and linear["common_tpf"] == 2.64
    assert linear["common_speedup"] == pytest.approx(0.6 * 2.64) and failed["common_tpf"] is None
    low, high = linear["common_tpf_interval"]
    assert 1.5 < low < 2.0 < high < 3.0  # 600 tokens in 300 forwards
    assert linear["tpf_interval"].keys() == {"jacobi@64"}
    assert (linear["noise"], linear["train_tokens"]) == (NOISE, 1_500_000)
    assert linear["paper"]["tpf"] == pytest.approx(1 / 0.46)
    assert reverse["paper"]["accuracy"] == 0.829
    assert failed["error"] == "stage round1/distill failed: no <memory>" and failed["best_tpf"] is None

    printed = capsys.readouterr().out
    markdown = (sweep / "sweep.md").read_text()
    for text in (printed, markdown):
        assert f"2.64 [{low:.2f}, {high:.2f}]" in text and "Compare jobs at one block size, jacobi@64" in " ".join(text.split())
        assert "2.17 (w=16)" in text and "1.58 @64" in text and "no <memory>" in text and "▄·········█" in text
    assert "Every job trained on the same number of packed tokens: 1,500,000." in markdown
    assert "Job 2 has no results: stage round1/distill failed: no <memory>" in markdown
    assert printed.splitlines()[-1] == f"sweep:     {sweep / 'sweep.html'}"
    page = (sweep / "sweep.html").read_text()
    assert "no &lt;memory&gt;" in page and "<memory>" not in page.split("</script>", 1)[1].split("<script", 1)[0]


def test_several_benchmarks_are_lines_of_their_own(tmp_path: Path, capsys):
    """The paper's figures are HumanEval's; intervals come from the answers to the benchmark that the line is of."""
    sweep = tmp_path / "sweep"
    for number, (kind, tpf) in enumerate({"linear": 2.0, "reverse": 1.5}.items()):
        harder = [r | {"benchmark": "human_eval", "tpf": r["tpf"] - 0.4, "accuracy": 0.25} for r in results(tpf)]
        write_job(sweep, number, kind, 8, rows=[*results(tpf), *harder])
        record = json.loads((sweep / str(number) / "job.json").read_text())
        record["stages"]["round1/human_eval/speed"] = str(tmp_path / f"timed-{number}")
        (sweep / str(number) / "job.json").write_text(json.dumps(record))
        write_speed(tmp_path / f"timed-{number}", forwards=40)
    write_job(sweep, 2, "random", 4, state="failed", error="no memory")
    assert write_sweep(sweep, paper="table4")
    rows = json.loads((sweep / "sweep.json").read_text())["rows"]
    assert [(row["number"], row["benchmark"]) for row in rows] == [
        *((None, name) for name in ("minicode", "human_eval")),
        *((number, name) for number in (0, 1) for name in ("minicode", "human_eval")),
        (2, None),
    ]
    mine, theirs = rows[2:4]
    assert (mine["tpf"]["jacobi@64"], theirs["tpf"]["jacobi@64"]) == (2.64, pytest.approx(2.24))
    assert (mine["accuracy"], theirs["accuracy"]) == (0.95, 0.25)
    assert mine["common_tpf_interval"][1] > 2.2 > theirs["common_tpf_interval"][1]
    assert (mine["noise"], theirs["noise"]) == (NOISE, None) and (mine["paper"], theirs["paper"]["accuracy"]) == (None, 0.817)
    assert capsys.readouterr().out.count("human_eval") >= 3
    page = (sweep / "sweep.html").read_text()
    assert "linear, 8, human_eval" in page and "linear, 8, minicode" in page


def test_unequal_training_is_said(tmp_path: Path):
    write_job(tmp_path / "sweep", 0, "linear", 8, rows=results(2.0))
    write_job(tmp_path / "sweep", 1, "random", 8, rows=[r | {"train_tokens": r["train_tokens"] // 2} for r in results(2.0)])
    write_sweep(tmp_path / "sweep", paper=None)
    markdown = (tmp_path / "sweep" / "sweep.md").read_text()
    assert "different numbers of packed tokens, 750,000 to 1,500,000" in markdown
    assert "paper" not in markdown.lower()
    assert "All jobs: experiment=ablate_noise rounds.0.window=8\n" in markdown  # what all share is no column


def test_a_killed_job_is_no_result_although_an_older_one_lies_there(tmp_path: Path):
    write_job(tmp_path / "sweep", 0, "linear", 8, rows=results(2.0))
    write_job(tmp_path / "sweep", 1, "random", 8, rows=results(2.0), state="unfinished")
    write_sweep(tmp_path / "sweep", paper=None)
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["rows"][2]["error"] == "has not ended"


def test_a_sweep_without_results_writes_nothing(tmp_path: Path, capsys):
    write_job(tmp_path / "sweep", 0, "linear", 8)
    assert not write_sweep(tmp_path / "sweep", paper=None)
    assert not any((tmp_path / "sweep" / name).exists() for name in FILES)
    assert capsys.readouterr().out == ""


TRACKING = TrackingConfig(experiment="e", wait_at_end=0)


def hydra_config(sweep: Path) -> SimpleNamespace:
    given = SimpleNamespace(task=["noise_schedule=linear,reverse,random", "rounds.0.window=8,4", "experiment=ablate_noise"])
    hydra = SimpleNamespace(sweep=SimpleNamespace(dir=str(sweep)), overrides=given)
    return SimpleNamespace(hydra=hydra, tracking=TRACKING, paths=SimpleNamespace(tracking_uri=None))


def test_it_is_attached_to_the_sweeps_mlflow_run(sweep: Path, tmp_path: Path):
    uri = sqlite_uri(tmp_path)
    info = SweepInfo(sweep, "a sweep", ["a=1"])
    with Tracker.start(tracking_uri=uri, backlog=tmp_path / "backlog", run_name="r", config={}, sweep=info, settings=TRACKING):
        pass
    SweepTable(paper="table4").on_multirun_end(hydra_config(sweep))
    client: MlflowClient = mlflow_runs.connect(uri)
    run_id = json.loads((sweep / "mlflow_sweep.json").read_text())["run_id"]
    assert {Path(item.path).name for item in client.list_artifacts(run_id, "sweep")} == {*FILES, "figures"}
    figures = {"every_job.json", "speed_accuracy_minicode.json", "noise.json"}
    assert {Path(item.path).name for item in client.list_artifacts(run_id, "sweep/figures")} == figures
    run = client.get_run(run_id)  # job 2 may have failed before it had a run of its own
    assert (run.info.status, run.data.tags["jobs"]) == ("FAILED", "3")
    assert run.data.tags["failed"] == "job 2"


def test_a_sweep_begun_again_in_its_folder_does_not_end_in_what_failed_before(tmp_path: Path):
    uri, folder, states = sqlite_uri(tmp_path), tmp_path / "sweep", []
    for failure in (RuntimeError, None):
        SweepTable().on_multirun_start(hydra_config(folder))
        info = SweepInfo(folder, "a sweep", ["a=1"])
        with (
            suppress(RuntimeError),
            Tracker.start(tracking_uri=uri, backlog=tmp_path / "backlog", run_name="r", config={}, sweep=info, settings=TRACKING),
        ):
            if failure:
                raise failure
        run_id = json.loads((folder / "mlflow_sweep.json").read_text())["run_id"]
        states.append(mlflow_runs.connect(uri).get_run(run_id).info.status)
    assert states == ["FAILED", "FINISHED"]


def test_a_table_that_cannot_be_made_changes_nothing(sweep: Path, tmp_path: Path, caplog):
    (sweep / "0" / "results.json").write_text("{")
    SweepTable().on_multirun_end(hydra_config(sweep))
    assert "its jobs are not affected" in caplog.text


def test_jobs_are_named_by_what_tells_them_apart_and_their_codes_are_read_from_their_records(tmp_path: Path, monkeypatch):
    folder = tmp_path / "sweep"
    write_job(folder, 7, "linear", 8)  # of an earlier start in the same folder
    monkeypatch.setattr(sweep_jobs, "begun", [])
    SweepTable().on_multirun_start(hydra_config(folder))
    assert list(sweep_jobs.records(folder)) == [] and sweep_jobs.exit_code() == 0
    write_job(folder, 0, "linear", 8)
    assert sweep_jobs.failed(folder) is None
    write_job(folder, 1, "reverse", 8, state="failed", error="stage round1/distill failed: no memory")
    change(folder / "1", code=2)
    assert (sweep_jobs.failed(folder), sweep_jobs.exit_code()) == (1, 2)
    change(folder / "0", cached=3)
    write_job(folder, 2, "random", 4, state="unfinished")
    change(folder / "1", code=0)
    assert sweep_jobs.exit_code() == 1  # job 2 was killed
    assert list(sweep_jobs.told(folder)) == [
        "1 of 3 jobs were finished before and taken from the store",
        "job 1 (noise_schedule=reverse rounds.0.window=8): stage round1/distill failed: no memory",
        "job 2 (noise_schedule=random rounds.0.window=4): has not ended",
        "2 of 3 jobs did not finish; the same command does only these again",
    ]


def change(job: Path, **values) -> None:
    record = json.loads((job / "job.json").read_text())
    (job / "job.json").write_text(json.dumps(record | values))
