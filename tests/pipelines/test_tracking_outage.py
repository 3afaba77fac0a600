"""What becomes of records while the tracking store is away: nothing is lost, doubled or out of order, and the run goes on."""

import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.arguments import run_tool
from pipelines.process import identity
from pipelines.tracking import __main__ as replay
from pipelines.tracking import channel as tracking_channel
from pipelines.tracking import mlflow_runs, mlflow_writes
from pipelines.tracking.backlog import Backlog
from pipelines.tracking.channel import Channel
from pipelines.tracking.settings import TrackingConfig
from pipelines.tracking.tracker import SweepInfo, Tracker
from tasks.stage import UserError

REPOSITORY = Path(__file__).parents[2]
SETTINGS = TrackingConfig(experiment="test", wait_at_end=0, system_metrics_every=0)


class Line:
    """The line to the store, which a test cuts and mends."""

    def __init__(self):
        self.cut, self.forgotten = False, (tracking_channel._outages, tracking_channel._tries, tracking_channel._warned)

    def check(self, uri: str) -> None:
        if self.cut:
            raise mlflow_runs.Away("nobody answers")

    def forget(self) -> None:
        """As if pauses were over, or as another process knows it."""
        for known in self.forgotten:
            known.clear()


@pytest.fixture(autouse=True)
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    made = Line()
    monkeypatch.setattr(mlflow_runs, "check_reachable", made.check)
    open_store = mlflow_runs.Connection.open

    def open_if_there(self, *, before_reaping):
        made.check(self.tracking_uri)
        open_store(self, before_reaping=before_reaping)

    monkeypatch.setattr(mlflow_runs.Connection, "open", open_if_there)
    made.forget()
    yield made
    made.forget()


def start(uri: str, tmp_path: Path, name: str = "run", sweep: SweepInfo | None = None, settings: TrackingConfig = SETTINGS):
    return Tracker.start(tracking_uri=uri, backlog=tmp_path / "backlog", run_name=name, config={"seed": 1}, sweep=sweep, settings=settings)


def all_runs(uri: str) -> dict:
    client = mlflow_runs.connect(uri)
    return {run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("test").experiment_id])}


def backlogs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "backlog").glob("*.jsonl"))


def test_an_outage_in_the_middle_of_a_run(uri: str, tmp_path: Path, line: Line, caplog: pytest.LogCaptureFixture):
    with start(uri, tmp_path) as tracker:
        with tracker.stage("s", fingerprint="f", params={"lr": 1}, cached=False) as run_id:
            report = pickle.loads(pickle.dumps(tracker.reporter(run_id)))
            report({"loss": 0.0}, 0)
            line.cut = True
            for step in range(1, 300):
                report({"loss": float(step)}, step)
        with tracker.stage("later", fingerprint="g", params={"lr": 2}, cached=False) as later:
            tracker.log_metrics({"x": 1}, run_id=later)
        assert later.startswith("pending-")
        assert len(backlogs(tmp_path)) == 1
        line.cut = False
        line.forget()
        tracker.log_metrics({"tpf": 2.0})  # the next record finds the store there again
        assert backlogs(tmp_path) == []
    runs = all_runs(uri)
    assert {name: run.info.status for name, run in runs.items()} == {"run": "FINISHED", "s": "FINISHED", "later": "FINISHED"}
    history = mlflow_runs.connect(uri).get_metric_history(run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(step, float(step)) for step in range(300)]
    later = runs["later"]
    assert (later.data.params, later.data.metrics) == ({"lr": "2"}, {"x": 1.0})
    assert later.data.tags["mlflow.parentRunId"] == runs["run"].info.run_id
    assert later.info.start_time <= later.info.end_time <= runs["run"].info.end_time
    told = [record.getMessage() for record in caplog.records]
    assert sum("is away (nobody answers): the run goes on" in text for text in told) == 1
    assert sum("waiting records were sent" in text for text in told) == 1


def test_what_a_run_could_not_send_is_sent_by_the_next(uri: str, tmp_path: Path, line: Line, caplog: pytest.LogCaptureFixture):
    with start(uri, tmp_path, "first") as tracker:
        line.cut = True
        tracker.log_metrics({"x": 1})
    assert all_runs(uri)["first"].info.status == "RUNNING"
    assert "2 records of this run wait in" in caplog.text and "python -m pipelines.tracking replay=" in caplog.text
    line.cut = False
    line.forget()
    with start(uri, tmp_path, "second"):
        first = all_runs(uri)["first"]
        assert (first.info.status, first.data.metrics) == ("FINISHED", {"x": 1.0})
    assert backlogs(tmp_path) == []


def test_away_at_the_start_is_an_outage_where_it_has_answered_before_and_a_wrong_address_where_not(uri: str, tmp_path: Path, line: Line):
    line.cut = True
    with pytest.raises(UserError, match="nobody answers"), start(uri, tmp_path):
        pass
    line.cut = False
    with start(uri, tmp_path, "known"):
        pass
    line.cut = True
    sweep = SweepInfo(tmp_path / "multirun", "sweep", ["seed=1"])
    for name in ("job0", "job1"):
        with start(uri, tmp_path, name, sweep=sweep) as tracker:
            tracker.log_metrics({"x": 1})
    assert len(backlogs(tmp_path)) == 2
    line.cut = False
    line.forget()
    assert run_tool([f"replay={tmp_path / 'backlog'}"], replay.Arguments, replay.replay) == 0
    runs = all_runs(uri)
    assert {name: run.info.status for name, run in runs.items()} == dict.fromkeys(["known", "sweep", "job0", "job1"], "FINISHED")
    assert {runs[name].data.tags["mlflow.parentRunId"] for name in ("job0", "job1")} == {runs["sweep"].info.run_id}


def test_runs_of_the_dead_are_ended_by_a_run_that_found_the_store_away_and_lives_to_see_it_back(uri: str, tmp_path: Path, line: Line):
    with start(uri, tmp_path, "known"):
        pass
    client = mlflow_runs.connect(uri)
    experiment = client.get_experiment_by_name("test").experiment_id
    dead = {**identity(), "process.started": "1000.0", "kind": "pipeline"}
    client.create_run(experiment, tags=dead, run_name="dead")
    line.cut = True
    with start(uri, tmp_path, "away to its end"):
        pass
    line.cut = False
    line.forget()
    assert all_runs(uri)["dead"].info.status == "RUNNING"
    line.cut = True
    with start(uri, tmp_path, "back before its end"):
        line.cut = False
        line.forget()
    assert {name: run.info.status for name, run in all_runs(uri).items()} == {
        "known": "FINISHED",
        "dead": "KILLED",
        "away to its end": "FINISHED",
        "back before its end": "FINISHED",
    }


def test_replay_tells_of_a_file_that_cannot_be_read(tmp_path: Path, capsys):
    (tmp_path / "torn.jsonl").write_text("not a record\n")
    assert run_tool([f"replay={tmp_path}"], replay.Arguments, replay.replay) == 1
    assert "1 of 1 files could not be read" in capsys.readouterr().out


def test_replay_says_what_does_not_arrive(uri: str, tmp_path: Path, line: Line, capsys):
    with start(uri, tmp_path):
        line.cut = True
    assert run_tool([f"replay={tmp_path / 'backlog'}"], replay.Arguments, replay.replay) == 1
    assert "1 waiting records: not all could be sent" in capsys.readouterr().out
    assert run_tool([f"replay={tmp_path / 'nowhere'}"], replay.Arguments, replay.replay) == 2


def test_a_store_that_is_away_is_left_alone_for_a_while(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def away(uri: str) -> None:
        asked.append(uri)
        raise mlflow_runs.Away("nobody answers")

    channel = Channel(uri, "test", tmp_path / "b.jsonl")
    monkeypatch.setattr(mlflow_runs, "check_reachable", away)
    clock = [100.0]
    monkeypatch.setattr(tracking_channel.time, "monotonic", lambda: clock[0])
    for step in range(5):
        channel.send("log_metrics", run="r", metrics=[["loss", 1.0, 0, step]])
    assert len(asked) == 1
    clock[0] += tracking_channel.PAUSES[0] + 0.1
    channel.send("log_metrics", run="r", metrics=[])
    channel.send("log_metrics", run="r", metrics=[])
    assert len(asked) == 2


def test_a_record_that_a_healthy_store_fails_on_does_not_hold_up_the_others(uri: str, tmp_path: Path, monkeypatch, caplog, line: Line):
    with start(uri, tmp_path) as tracker:
        pass
    channel = tracker.channel

    def broken(store, *, run):
        raise RuntimeError("internal error")

    monkeypatch.setitem(mlflow_writes.WRITES, "settle_sweep", broken)
    channel.send("settle_sweep", run=tracker.run_id)
    channel.send("log_metrics", run=tracker.run_id, metrics=[["x", 1.0, 0, 0]])
    assert not channel.deliver(now=True) and backlogs(tmp_path) != []
    assert any(channel.deliver(now=True) for _ in range(tracking_channel.TRIES))
    assert all_runs(uri)["run"].data.metrics == {"x": 1.0}
    assert "not recorded in MLflow (settle_sweep" in caplog.text


def test_records_that_arrived_although_the_answer_was_lost_are_not_doubled(uri: str, tmp_path: Path, line: Line, monkeypatch):
    send, lost = mlflow_writes.send, []

    def answer_lost(store, record, *, first=False):
        answer = send(store, record, first=first)
        if first and record["write"] not in lost:
            lost.append(record["write"])
            raise ConnectionError("reset by peer")
        return answer

    monkeypatch.setattr(mlflow_writes, "send", answer_lost)
    with start(uri, tmp_path) as tracker:
        line.forget()
        with tracker.stage("s", fingerprint="f", params={"a": 1}, cached=False) as run_id:
            for step in range(3):
                line.forget()
                tracker.reporter(run_id)({"loss": step}, step)
    assert {"create_run", "log_metrics"} <= set(lost)
    runs = mlflow_runs.connect(uri).search_runs([tracker.experiment_id])
    assert sorted(run.info.run_name for run in runs) == ["run", "s"]
    (stage,) = (run for run in runs if run.info.run_name == "s")
    assert [p.step for p in mlflow_runs.connect(uri).get_metric_history(stage.info.run_id, "loss")] == [0, 1, 2]
    assert {run.info.status for run in runs} == {"FINISHED"} and backlogs(tmp_path) == []


def test_a_locked_database_is_waited_for(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    with start(uri, tmp_path) as tracker:
        client, refused = mlflow_runs.connect(uri), [3]
        log_batch = type(client).log_batch

        def locked(self, *args, **kwargs):
            if refused[0]:
                refused[0] -= 1
                raise RuntimeError("(sqlite3.OperationalError) database is locked")
            return log_batch(self, *args, **kwargs)

        monkeypatch.setattr(type(client), "log_batch", locked)
        tracker.log_metrics({"x": 1})
    assert refused == [0] and all_runs(uri)["run"].data.metrics == {"x": 1.0}
    assert caplog.records == []


def test_a_backlog_survives_torn_lines_and_a_sender_that_dies(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    backlog = Backlog(tmp_path / "b.jsonl", "sqlite:///x", "e")
    for number in range(4):
        backlog.append({"write": "log_text", "run": "r", "number": number})
    with backlog.file.open("a") as lines:
        lines.write('{"write": "log_te')  # the disk was full, or the process killed
    backlog.append({"write": "log_text", "run": "r", "number": 4})
    assert backlog.waiting() == 5
    arrived = []

    def until_two(record):
        if record["number"] == 2 and not arrived.count(2):
            arrived.append(2)
            raise ConnectionError
        arrived.append(record["number"])

    with pytest.raises(ConnectionError):
        backlog.send_all(until_two)
    assert Backlog.read(backlog.file) == backlog and backlog.waiting() == 3
    assert backlog.send_all(until_two) == 3
    assert arrived == [0, 1, 2, 2, 3, 4]
    assert backlog.empty() and [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert "cut short" in caplog.text
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="not a backlog"):
        Backlog.read(tmp_path / "other.jsonl")


def test_points_of_one_run_are_sent_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelines.tracking.backlog.METRICS", 10)
    backlog = Backlog(tmp_path / "b.jsonl", "sqlite:///x", "e")
    for step in range(25):
        backlog.append({"write": "log_metrics", "run": "r" if step < 24 else "s", "metrics": [["loss", 1.0, 0, step]]})
    sizes = []
    assert backlog.send_all(lambda record: sizes.append(len(record["metrics"]))) == 25
    assert sizes == [10, 10, 4, 1]


def test_a_disk_that_was_full_at_the_first_record_hides_none_that_follow(tmp_path: Path):
    backlog = Backlog(tmp_path / "b.jsonl", "http://nowhere", "e")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError):
            backlog.append({"write": "a"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    backlog.append({"write": "b"})
    assert Backlog.read(backlog.file) == backlog and backlog.waiting() == 1
