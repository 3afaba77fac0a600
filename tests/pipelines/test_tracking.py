"""What MLflow holds after runs that end well, badly and violently. Real sqlite databases; other processes where one must die."""

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.graph.dag import Graph, Stage, plan
from pipelines.graph.execute import execute
from pipelines.process import Terminated, identity, is_gone
from pipelines.store import Store
from pipelines.tracking import channel as tracking_channel
from pipelines.tracking import mlflow_runs, run_records
from pipelines.tracking.settings import TrackingConfig
from pipelines.tracking.tracker import SweepInfo, Tracker, sqlite_uri, ui_command
from tasks.stage import ClusterConfig, UserError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_outage_known():
    """What this process learned of a store in another test."""
    for known in (tracking_channel._outages, tracking_channel._tries, tracking_channel._warned):
        known.clear()


SETTINGS = TrackingConfig(experiment="test", wait_at_end=0, system_metrics_every=0)


def start(uri: str, name: str = "run", config: dict | None = None, sweep: SweepInfo | None = None, settings: TrackingConfig = SETTINGS):
    database = mlflow_runs.sqlite_path(uri)
    backlog = Path(os.devnull) if database is None else database.parent / "backlog"
    return Tracker.start(tracking_uri=uri, backlog=backlog, run_name=name, config=config or {}, sweep=sweep, settings=settings)


def all_runs(uri: str) -> dict:
    client = mlflow_runs.connect(uri)
    return {run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("test").experiment_id])}


def states(uri: str) -> dict[str, str]:
    return {name: run.info.status for name, run in all_runs(uri).items()}


def test_a_pipeline_run_with_its_stages_is_recorded(uri: str, tmp_path: Path):
    config = {"seed": 1, "rounds": [{"block_size": 16}], "blocks": [16, 32], "text": "x" * 10_000}
    table = tmp_path / "table.csv"
    table.write_text("a,b")
    with start(uri, config=config) as tracker:
        with tracker.stage("round1/distill", fingerprint="f00", params={"lr": 1e-4}, cached=False) as run_id:
            tracker.reporter(run_id)({"loss": 2.0}, 1)
            tracker.reporter(run_id)({"loss": 1.0}, 2)
            tracker.log_metrics({"tokens": 5, "odd name (%)": 3}, run_id=run_id)
            assert states(uri) == {"run": "RUNNING", "round1/distill": "RUNNING"}
        tracker.log_artifact(table, "results")
        tracker.log_metrics({"tpf": 4.0})
    client, run = mlflow_runs.connect(uri), all_runs(uri)["run"]
    assert run.info.status == "FINISHED"
    assert {key: run.data.params[key] for key in ("seed", "rounds.0.block_size", "blocks")} == {
        "seed": "1",
        "rounds.0.block_size": "16",
        "blocks": "[16, 32]",
    }
    assert len(run.data.params["text"]) == 500
    assert run.data.metrics == {"tpf": 4.0}
    artifacts = tmp_path / "my outputs" / "artifacts" / run.info.run_id / "artifacts"
    assert (artifacts / "results" / "table.csv").read_text() == "a,b"
    assert "x" * 10_000 in (artifacts / "config.yaml").read_text()
    stage = all_runs(uri)["round1/distill"]
    assert stage.info.status == "FINISHED"
    assert stage.data.params == {"lr": "0.0001"}
    assert stage.data.metrics == {"loss": 1.0, "tokens": 5, "odd name ___": 3}
    wanted = {"mlflow.parentRunId": run.info.run_id, "stage": "round1/distill", "fingerprint": "f00", "cached": "false"}
    assert wanted.items() <= stage.data.tags.items()
    assert [(point.step, point.value) for point in client.get_metric_history(stage.info.run_id, "loss")] == [(1, 2.0), (2, 1.0)]


def test_more_params_than_a_store_takes_are_cut_with_a_word(uri: str, caplog: pytest.LogCaptureFixture):
    with start(uri, config={f"k{i}": i for i in range(run_records.PARAM_COUNT + 50)}):
        pass
    assert len(all_runs(uri)["run"].data.params) == run_records.PARAM_COUNT
    assert "config.yaml has all" in caplog.text


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("boom"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (Terminated(), "KILLED"), (SystemExit(15), "KILLED")]
)
def test_an_error_in_a_stage_ends_both_runs(uri: str, tmp_path: Path, error: BaseException, status: str):
    with pytest.raises(type(error)) as caught, start(uri) as tracker, tracker.stage("s", fingerprint="f", params={}, cached=False):
        raise error
    assert getattr(caught.value, "code", 143) == 143  # 15 is what Ray makes of SIGTERM
    assert states(uri) == {"run": status, "s": status}
    run = all_runs(uri)["s"]
    assert run.data.tags["error"].startswith(type(error).__name__)
    assert bool(list((tmp_path / "my outputs" / "artifacts" / run.info.run_id).rglob("traceback.txt"))) is (status == "FAILED")


def test_sigterm_interrupts_once_and_its_handler_is_put_back(uri: str):
    before = signal.getsignal(signal.SIGTERM)
    steps = []
    with pytest.raises(Terminated), start(uri):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("not interrupted")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # an impatient scheduler
            steps.append("cleaned up")
    assert steps == ["cleaned up"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert states(uri) == {"run": "KILLED"}


def test_two_runs_in_one_process_do_not_mix(uri: str):
    with start(uri, "one", {"lr": 1}) as one, start(uri, "two", {"lr": 2}) as two:
        assert one.run_id != two.run_id
        two.log_metrics({"x": 2})
        one.log_metrics({"x": 1})
    runs = all_runs(uri)
    assert [(runs[name].data.params["lr"], runs[name].data.metrics["x"]) for name in ("one", "two")] == [("1", 1.0), ("2", 2.0)]
    assert not any("mlflow.parentRunId" in run.data.tags for run in runs.values())


def one_metric(config, inputs, output, context):
    context.report({"loss": 0.5}, 7)
    return {"rows": 3}


def test_a_cached_stage_shows_with_its_metrics(uri: str, tmp_path: Path):
    store = Store(tmp_path / "store")
    graph = Graph([Stage("round1/pack", "pack", 1, f"{__name__}:one_metric", {"n": 16})])
    for name in ("first", "second"):
        with start(uri, name) as tracker:
            manifests = execute(plan(graph, store), store, tracker, ClusterConfig())
    client = mlflow_runs.connect(uri)
    runs = [run for run in client.search_runs([tracker.experiment_id], order_by=["start_time"]) if run.info.run_name == "round1/pack"]
    assert [run.data.tags["cached"] for run in runs] == ["false", "true"]
    assert [run.data.metrics["rows"] for run in runs] == [3, 3]
    assert [run.data.metrics.get("loss") for run in runs] == [0.5, None]
    assert runs[1].data.tags["mlflow.parentRunId"] == tracker.run_id
    assert runs[1].data.params == {"n": "16"}
    assert manifests["round1/pack"].mlflow_run_id == runs[0].info.run_id


def test_a_reporter_survives_pickling_and_bad_numbers(uri: str, caplog: pytest.LogCaptureFixture):
    with start(uri) as tracker:
        reporter = pickle.loads(pickle.dumps(tracker.reporter(tracker.run_id)))
        reporter({"loss": float("nan"), "scale": float("inf"), "lr": 0.1}, 3)
        reporter({"loss": 0.5}, 4)
        for step in range(3):
            tracker.reporter("0" * 32)({"loss": 1.0}, step)  # a run the store does not have
    assert all_runs(uri)["run"].data.metrics == {"loss.non_finite": 1.0, "scale.non_finite": 1.0, "lr": 0.1, "loss": 0.5}
    assert caplog.text.count("not recorded in MLflow") == 1


def test_what_the_store_refuses_costs_a_warning_not_the_run(uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with start(uri) as tracker:
        tracker.log_metrics({"x": 1}, run_id="0" * 32)
        tracker.log_artifact(tmp_path / "missing.csv")
    assert caplog.text.count("not recorded in MLflow") == 2
    assert states(uri) == {"run": "FINISHED"}


def test_the_same_run_again_with_another_learning_rate(uri: str, caplog: pytest.LogCaptureFixture):
    """Params are write-once in MLflow: whoever resumes into an old run with a changed setting is refused. Ours are runs of their own."""
    for rate in (1e-5, 1e-6):
        with start(uri, f"lr {rate}", {"lr": rate}) as tracker, tracker.stage("d", fingerprint="f", params={"lr": rate}, cached=False):
            pass
    assert {name: run.data.params["lr"] for name, run in all_runs(uri).items() if name != "d"} == {"lr 1e-05": "1e-05", "lr 1e-06": "1e-06"}
    assert caplog.records == []


def test_jobs_of_one_multirun_share_a_sweep_run(uri: str, tmp_path: Path):
    def job(number: int, fail: bool = False):
        with start(uri, f"job{number}", sweep=SweepInfo(tmp_path / "multirun", "sweep", [f"seed={number}"])):
            assert states(uri)["sweep"] == "RUNNING"
            if fail:
                raise RuntimeError

    job(0)
    assert states(uri) == {"sweep": "FINISHED", "job0": "FINISHED"}
    with pytest.raises(RuntimeError):
        job(1, fail=True)
    job(2)
    assert states(uri) == {"sweep": "FAILED", "job0": "FINISHED", "job1": "FAILED", "job2": "FINISHED"}
    runs = all_runs(uri)
    assert {runs[f"job{i}"].data.tags["mlflow.parentRunId"] for i in range(3)} == {runs["sweep"].info.run_id}
    assert runs["job2"].data.tags["overrides"] == "seed=2"
    assert len(runs) == 4


def test_a_sweep_runs_until_its_last_job_and_outlives_its_database(uri: str, tmp_path: Path):
    sweep = SweepInfo(tmp_path / "multirun", "sweep", [])
    with start(uri, "long", sweep=sweep):
        with start(uri, "short", sweep=sweep):
            pass
        assert states(uri)["sweep"] == "RUNNING"
    assert states(uri)["sweep"] == "FINISHED"
    (sweep.directory / "mlflow_sweep.json").write_text(json.dumps({"handle": "0" * 32}))
    with start(uri, "later", sweep=sweep):
        pass
    assert states(uri)["sweep"] == "FINISHED"


@pytest.mark.parametrize("setting", ["sqlite:///{file}/below/mlflow.db", "nonsense://x", "{file}"])
def test_a_store_that_cannot_be_opened_is_one_line(tmp_path: Path, setting: str):
    (tmp_path / "file").touch()
    setting = setting.format(file=tmp_path / "file")
    with pytest.raises(UserError, match="paths.tracking_uri=") as caught, start(setting):
        pass
    assert "\n" not in str(caught.value)


def test_an_experiment_that_another_process_just_made_is_used_and_a_deleted_one_refused(uri: str, monkeypatch: pytest.MonkeyPatch):
    with start(uri) as first:
        pass
    client = mlflow_runs.connect(uri)
    look_up, answers = client.get_experiment_by_name, [None]
    monkeypatch.setattr(client, "get_experiment_by_name", lambda name: answers.pop() if answers else look_up(name))
    with start(uri, "second") as second:
        assert second.experiment_id == first.experiment_id
    client.delete_experiment(first.experiment_id)
    with pytest.raises(UserError, match="'test': it was deleted"), start(uri, "third"):
        pass


def test_a_sweep_of_more_jobs_than_one_answer_holds_is_settled_by_all(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep, client = SweepInfo(tmp_path / "multirun", "sweep", []), mlflow_runs.connect(uri)
    search = client.search_runs
    monkeypatch.setattr(client, "search_runs", lambda *given, **named: search(*given, **{**named, "max_results": 1}))
    with pytest.raises(RuntimeError), start(uri, "first", sweep=sweep):
        raise RuntimeError
    with start(uri, "second", sweep=sweep):
        pass
    monkeypatch.undo()
    assert states(uri) == {"sweep": "FAILED", "first": "FAILED", "second": "FINISHED"}


def test_the_uri_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert sqlite_uri(Path("outputs")) == f"sqlite:///{tmp_path}/outputs/mlflow.db"
    command = ui_command("sqlite:///a b.db")
    assert f"'sqlite:///{tmp_path}/a b.db'" in command and "--host 127.0.0.1" in command
    assert ui_command("http://tracker:5000") == "http://tracker:5000"


def test_only_a_process_known_to_be_over_is_gone():
    assert not is_gone(identity())
    assert is_gone({**identity(), "process.started": "1000.0"})  # its number belongs to another process now
    assert not is_gone({**identity(), "process.started": "1000.0", "process.host": "elsewhere"})
    assert not is_gone({})  # a run that something else records
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_gone({**identity(), "process.pid": str(ended.pid)})


def test_importing_tracking_leaves_mlflow_alone():
    check = "import sys, pipelines.tracking.tracker, pipelines.graph.execute; sys.exit(bool({'mlflow', 'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY).returncode == 0


SLEEPER = """
import sys, time
from pathlib import Path
from pipelines.tracking.tracker import SweepInfo, Tracker
from pipelines.tracking.settings import TrackingConfig
sweep = SweepInfo(Path(sys.argv[2]), "sweep", [])
settings = TrackingConfig(experiment="test")
with Tracker.start(
    tracking_uri=sys.argv[1], backlog=sys.argv[2] + "-backlog", settings=settings, run_name="run", config={}, sweep=sweep
) as tracker:
    with tracker.stage("s", fingerprint="f", params={}, cached=False):
        print("ready", flush=True)
        time.sleep(60)
"""


def sleeper(uri: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", SLEEPER, uri, str(folder)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_sigterm_ends_the_runs_as_killed(uri: str, tmp_path: Path):
    process = sleeper(uri, tmp_path / "multirun")
    process.terminate()
    assert process.wait(30) == 143
    assert states(uri) == {"sweep": "FAILED", "run": "KILLED", "s": "KILLED"}


def test_runs_of_a_process_that_was_shot_are_ended_by_the_next_start(uri: str, tmp_path: Path):
    process = sleeper(uri, tmp_path / "multirun")
    with start(uri, "while it lives"):
        pass
    process.kill()
    process.wait()
    assert states(uri) == {"sweep": "RUNNING", "run": "RUNNING", "s": "RUNNING", "while it lives": "FINISHED"}
    with start(uri, "next"):
        assert states(uri) == {"sweep": "FAILED", "run": "KILLED", "s": "KILLED", "while it lives": "FINISHED", "next": "RUNNING"}


def test_a_run_that_ends_just_as_the_next_one_looks_keeps_its_state(uri: str, monkeypatch: pytest.MonkeyPatch):
    client = mlflow_runs.connect(uri)

    def ends_and_exits(tags: dict) -> bool:
        client.set_terminated(old.run_id, "FINISHED")
        return True

    with start(uri, "old") as old:
        monkeypatch.setattr(mlflow_runs, "is_gone", ends_and_exits)
        with start(uri, "new"):
            assert states(uri) == {"old": "FINISHED", "new": "RUNNING"}


TOGETHER = """
import logging, multiprocessing, os, sys
import mlflow.store.tracking.sqlalchemy_store  # once, before the fork: eight imports would take longer than the test
from pathlib import Path
from pipelines.tracking.tracker import SweepInfo, Tracker
from pipelines.tracking.settings import TrackingConfig

def job(number):
    barrier.wait()
    sweep = SweepInfo(Path(sys.argv[2]), "sweep", [])
    settings = TrackingConfig(experiment="test")
    with Tracker.start(
        tracking_uri=sys.argv[1], backlog=sys.argv[2] + "-backlog", settings=settings, run_name=f"job{number}", config={"n": number}, sweep=sweep
    ) as tracker:
        tracker.log_metrics({"n": number})

count = int(sys.argv[3])
context = multiprocessing.get_context("fork")
barrier = context.Barrier(count)
jobs = [context.Process(target=job, args=(number,)) for number in range(count)]
for process in jobs:
    process.start()
for process in jobs:
    process.join()
sys.exit(max(process.exitcode for process in jobs))
"""


@pytest.mark.parametrize("count", [8, 16])
def test_processes_that_start_at_once_on_an_empty_store(tmp_path: Path, count: int):
    uri = sqlite_uri(tmp_path / "outputs")
    working_directory = tmp_path / "cwd"
    working_directory.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", TOGETHER, uri, str(tmp_path / "multirun"), str(count)]
    done = subprocess.run(command, cwd=working_directory, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "not recorded" not in done.stderr and "alembic" not in done.stderr and "Creating initial" not in done.stderr
    assert list(working_directory.iterdir()) == []
    client = mlflow_runs.connect(uri)
    assert [item.name for item in client.search_experiments(filter_string="name != 'Default'")] == ["test"]
    runs = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    assert sorted(run.info.run_name for run in runs) == [*sorted(f"job{i}" for i in range(count)), "sweep"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert all(run.data.metrics["n"] == int(run.data.params["n"]) for run in runs if run.info.run_name != "sweep")


def test_mlflow_stays_silent_while_it_makes_a_database(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with start(sqlite_uri(tmp_path)):
        pass
    assert caplog.records == []
