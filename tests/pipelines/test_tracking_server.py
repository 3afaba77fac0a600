"""A real tracking server that is killed in the middle of a run and comes back, and what only a server refuses."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.tracking import channel as tracking_channel
from pipelines.tracking import mlflow_runs
from pipelines.tracking.settings import TrackingConfig
from pipelines.tracking.tracker import SweepInfo, Tracker
from tests.pipelines.test_tracking_lineage import planned, record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = TrackingConfig(experiment="test", wait_at_end=300, system_metrics_every=0)


class Server:
    """As docs/tracking.md starts one: sqlite, artifacts through the server, two processes."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.process = folder, None
        self.uri = f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        places = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--artifacts-destination", str(self.folder / "artifacts")]
        command = [sys.executable, "-m", "mlflow", "server", *places, "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        deadline = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self.process.poll() is None, (self.folder / "server.log").read_text()[-2000:]
                time.sleep(0.3)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    made.begin()
    made.wait()
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def no_outage_known():
    for known in (tracking_channel._outages, tracking_channel._tries, tracking_channel._warned):
        known.clear()


def start(server: Server, folder: Path, name: str, sweep: SweepInfo | None = None):
    return Tracker.start(tracking_uri=server.uri, backlog=folder / "backlog", run_name=name, config={"lr": 1}, sweep=sweep, settings=SETTINGS)


def runs(server: Server) -> dict:
    client = mlflow_runs.connect(server.uri)
    return {run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("test").experiment_id])}


def test_a_server_that_is_killed_and_comes_back_has_every_point_in_the_end(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    note = tmp_path / "note.txt"
    note.write_text("kept")
    sweep = SweepInfo(tmp_path / "multirun", "sweep", ["seed=1"])
    with start(server, tmp_path, "interrupted", sweep=sweep) as tracker:
        with tracker.stage("before", fingerprint="f", params={"a": 1}, cached=False) as run_id:
            report = tracker.reporter(run_id)
            report({"loss": 0.0}, 0)
            server.kill()
            waited = time.monotonic()
            for step in range(1, 60):
                report({"loss": float(step)}, step)
            waited = time.monotonic() - waited
        with tracker.stage("during", fingerprint="g", params={"a": 2}, cached=False) as during:
            tracker.log_metrics({"x": 1}, run_id=during)
        tracker.log_artifact(note, "notes")
        server.begin()  # and the run ends while it starts: the end waits for it
    assert waited < 60, "training waits for a dead server"
    found = runs(server)
    assert {name: run.info.status for name, run in found.items()} == dict.fromkeys(["sweep", "interrupted", "before", "during"], "FINISHED")
    client = mlflow_runs.connect(server.uri)
    history = client.get_metric_history(run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(step, float(step)) for step in range(60)]
    assert found["during"].data.params == {"a": "2"} and found["during"].data.metrics == {"x": 1.0}
    assert Path(client.download_artifacts(found["interrupted"].info.run_id, "notes/note.txt", str(tmp_path))).read_text() == "kept"
    assert "is away" in caplog.text and "is back after" in caplog.text
    assert list((tmp_path / "backlog").glob("*.jsonl")) == []


def test_an_export_on_a_disk_that_the_server_may_not_see_is_registered_by_its_small_files(server: Server, tmp_path: Path, monkeypatch):
    stage, manifest = planned(tmp_path, "export", "e1", "model")
    (stage.folder / "config.json").write_text("{}")
    (stage.folder / "custom_generate").mkdir()
    (stage.folder / "custom_generate" / "generate.py").write_text("pass")
    (stage.folder / "model.safetensors").write_bytes(b"0" * (2**20 + 1))
    report, report_manifest = planned(tmp_path, "report", "r1", "export/final")
    report.upstream["export/final"] = "e1"
    with start(server, tmp_path, "exported") as tracker:
        run_id = record(tracker, stage, manifest)
        record(tracker, report, report_manifest)
    client = mlflow_runs.connect(server.uri)
    version = client.get_model_version_by_alias("exported", "newest")
    assert (version.run_id, version.tags["folder"]) == (run_id, stage.folder.as_uri())

    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    found = Path(mlflow.artifacts.download_artifacts("models:/exported@newest"))
    files = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()}
    assert {"config.json", "custom_generate/generate.py", "where.json"} <= files and "model.safetensors" not in files
