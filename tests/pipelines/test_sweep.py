"""What a sweep ends in, from hand-made results: jobs that finished, failed or were killed, and what is said about them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient

from pipelines import mlflow_runs
from pipelines.job_record import JobRecord
from pipelines.sweep import FILES, SweepTable, write_sweep
from pipelines.tracking import SweepInfo, Tracker, sqlite_uri
from tasks.completion_files import Completion, write_completions
from tests.results import ar_row, row, trained_row

NOISE = {"edges": [i / 10 for i in range(11)], "counts": [4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8], "mean": 0.66}


def write_job(
    sweep: Path, number: int, kind: str, window: int, *, rows: list | None = None, state: str = "finished", error: str | None = None
) -> None:
    folder, pack = sweep / str(number), sweep.parent / "store" / f"pack-{number}"
    folder.mkdir(parents=True)
    config = {"noise_schedule": kind, "rounds": [{"block_size": 8, "window": window, "noise_schedule": None}], "distill": {"mask": "nc"}}
    overrides = ["experiment=ablate_noise", f"noise_schedule={kind}", f"rounds.0.window={window}"]
    speed = sweep.parent / "store" / f"speed-{number}"
    JobRecord(folder, number, overrides, config, {"prompts": "x", "round1/pack": str(pack), "round1/speed": str(speed)}, state, error).save()
    if rows is not None:
        write_speed(speed)
        (folder / "results.json").write_text(json.dumps({"rows": rows}))
        pack.mkdir(parents=True)
        (pack / "noise.json").write_text(json.dumps({k: NOISE[k] for k in ("edges", "counts")} | {"by_window_position": []}))
        (pack / "manifest.json").write_text(json.dumps({"metrics": {"noise_ratio_mean": NOISE["mean"]}}))


def write_speed(folder: Path) -> None:
    """Ten prompts at block size 64, five of which took twice as many forwards, and the same in batches, which count for nothing here."""
    folder.mkdir(parents=True)
    timed = [
        Completion(i, "jacobi", 64, size, i, 4, [7] * 60, "", "eos", 20 + 20 * (i % 2), [], 1.0, 0.1, False) for size in (1, 16) for i in range(10)
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


def hydra_config(sweep: Path, outputs: Path) -> SimpleNamespace:
    paths = SimpleNamespace(tracking_uri=None, outputs=str(outputs))
    return SimpleNamespace(hydra=SimpleNamespace(sweep=SimpleNamespace(dir=str(sweep))), paths=paths)


def test_it_is_attached_to_the_sweeps_mlflow_run(sweep: Path, tmp_path: Path):
    uri = sqlite_uri(tmp_path)
    with Tracker.start(tracking_uri=uri, experiment="e", run_name="r", config={}, sweep=SweepInfo(sweep, "a sweep", ["a=1"])):
        pass
    SweepTable(paper="table4").on_multirun_end(hydra_config(sweep, tmp_path))
    client: MlflowClient = mlflow_runs.connect(uri)
    run_id = json.loads((sweep / "mlflow_sweep.json").read_text())["run_id"]
    assert {Path(item.path).name for item in client.list_artifacts(run_id, "sweep")} == set(FILES)


def test_a_table_that_cannot_be_made_changes_nothing(sweep: Path, tmp_path: Path, caplog):
    (sweep / "0" / "results.json").write_text("{")
    SweepTable().on_multirun_end(hydra_config(sweep, tmp_path))
    assert "its jobs are not affected" in caplog.text
