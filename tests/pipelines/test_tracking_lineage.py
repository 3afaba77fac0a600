"""What a run is linked to in MLflow: its data, the registered model that its export is, and what the machine did meanwhile."""

import json
import math
import time
from pathlib import Path

import pytest

from pipelines.graph.dag import PlannedStage, Stage
from pipelines.store import Manifest
from pipelines.tracking import mlflow_runs
from pipelines.tracking.settings import TrackingConfig
from pipelines.tracking.system_metrics import watched
from pipelines.tracking.tracker import Tracker

SETTINGS = TrackingConfig(experiment="test", wait_at_end=0, system_metrics_every=0)


def start(uri: str, tmp_path: Path, name: str = "a run: paper/7b", settings: TrackingConfig = SETTINGS):
    return Tracker.start(tracking_uri=uri, backlog=tmp_path / "backlog", run_name=name, config={}, settings=settings)


def planned(tmp_path: Path, kind: str, fingerprint: str, *inputs: str, **external) -> tuple[PlannedStage, Manifest]:
    """A finished stage; its inputs have their names as fingerprints."""
    folder = tmp_path / "store" / f"{kind}-{fingerprint}"
    folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(f"round1/{kind}", kind, 1, "x:y", None, {name: name for name in inputs}, external)
    sources = {name: tmp_path / "store" / name for name in inputs}
    upstream = {name: f"{name}-fp" for name in inputs}
    config = {"source": "minicode", "train": 64, "max_prompt_tokens": 512}
    manifest = Manifest(stage.id, kind, 1, fingerprint, config, upstream, external, {"train": 64}, "now", 1.0, None, None)
    return PlannedStage(stage, fingerprint, folder, False, False, sources, upstream), manifest


def record(tracker: Tracker, stage: PlannedStage, manifest: Manifest, folder: str | None = None) -> str:
    with tracker.stage(stage.stage.id, fingerprint=stage.fingerprint, params={}, cached=False) as run_id:
        tracker.log_lineage(stage, manifest, run_id=run_id, folder=folder or stage.folder.as_uri())
    return run_id


def test_prompts_are_an_input_of_the_run_and_every_stage_names_its_data(uri: str, tmp_path: Path):
    with start(uri, tmp_path) as tracker:
        prompts = record(tracker, *planned(tmp_path, "prompts", "f00d", data={"sha256": "abc"}))
        answers = record(tracker, *planned(tmp_path, "answers", "f01", "prompts", "model"))
        distill = record(tracker, *planned(tmp_path, "distill", "f02", "packed", "model", "prompts"))
    client = mlflow_runs.connect(uri)

    def inputs(run_id: str) -> list[tuple[str, str, str]]:
        found = client.get_run(run_id).inputs.dataset_inputs
        return sorted((item.dataset.name, item.dataset.digest, item.tags[0].value) for item in found)

    assert inputs(tracker.run_id) == inputs(prompts) == [("prompts", "f00d", "training")]
    dataset = client.get_run(prompts).inputs.dataset_inputs[0].dataset
    source = json.loads(dataset.source)
    assert (source["source"], source["identity"], source["train"]) == ("minicode", {"sha256": "abc"}, 64)
    assert json.loads(dataset.profile) == {"train": 64}
    assert inputs(answers) == [("prompts", "prompts-fp", "evaluation")]
    assert inputs(distill) == [("packed", "packed-fp", "training"), ("prompts", "prompts-fp", "training")]


def test_an_export_is_registered_once_with_a_way_back_and_the_last_one_gets_the_alias(uri: str, tmp_path: Path, monkeypatch):
    exports = [planned(tmp_path, "export", fingerprint, "model") for fingerprint in ("e1", "e2")]
    (exports[1][0].folder / "config.json").write_text("{}")
    report, manifest = planned(tmp_path, "report", "r1", "export/final")
    report.upstream["export/final"] = "e2"
    for _ in range(2):  # the second time as a cached run would
        with start(uri, tmp_path) as tracker:
            run_ids = [record(tracker, *export) for export in exports]
            record(tracker, report, manifest)
    client = mlflow_runs.connect(uri)
    (model,) = client.search_registered_models()
    assert model.name == "a run- paper-7b"  # of what a run may be called MLflow refuses some
    versions = client.search_model_versions(f"name = '{model.name}'")
    assert {version.tags["fingerprint"] for version in versions} == {"e1", "e2"} and len(versions) == 2
    newest = client.get_model_version_by_alias(model.name, "newest")
    assert newest.tags["fingerprint"] == "e2" and newest.tags["stage"] == "round1/export"
    assert newest.source == exports[1][0].folder.as_uri()  # nothing is copied
    first_run = client.get_run(newest.run_id)
    assert first_run.data.tags["fingerprint"] == "e2" and newest.run_id not in run_ids
    (output,) = first_run.outputs.model_outputs
    logged = client.get_logged_model(output.model_id)
    assert (logged.source_run_id, logged.status, logged.tags["fingerprint"]) == (newest.run_id, "READY", "e2")

    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    found = mlflow.artifacts.download_artifacts(f"models:/{model.name}@newest")
    assert (Path(found) / "config.json").read_text() == "{}"


def test_an_export_on_object_storage_is_registered_where_it_lies(uri: str, tmp_path: Path):
    stage, manifest = planned(tmp_path, "export", "e1", "model")
    stage.folder.rmdir()  # cached: nothing was downloaded
    with start(uri, tmp_path) as tracker:
        record(tracker, stage, manifest, folder="s3://bucket/store/export-e1/place?endpoint_override=minio:9000&scheme=http")
    (version,) = mlflow_runs.connect(uri).search_model_versions()
    assert version.source == "s3://bucket/store/export-e1/place"
    assert version.tags["folder"] == "s3://bucket/store/export-e1/place?endpoint_override=minio:9000&scheme=http"  # all that opens it


def test_nothing_is_registered_where_it_is_not_wanted(uri: str, tmp_path: Path):
    with start(uri, tmp_path, settings=TrackingConfig(experiment="test", register=False)) as tracker:
        record(tracker, *planned(tmp_path, "export", "e1", "model"))
    assert mlflow_runs.connect(uri).search_registered_models() == []


def test_what_the_machine_does_is_a_curve_of_a_stage_that_runs(uri: str, tmp_path: Path):
    settings = TrackingConfig(experiment="test", wait_at_end=0, system_metrics_every=0.05)
    with start(uri, tmp_path, settings=settings) as tracker:
        with tracker.stage("s", fingerprint="f", params={}, cached=False) as run_id:
            deadline = time.monotonic() + 60
            while "system/cpu_utilization_percentage" not in mlflow_runs.connect(uri).get_run(run_id).data.metrics:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        with tracker.stage("c", fingerprint="f", params={}, cached=True) as cached:
            time.sleep(0.2)
    metrics = mlflow_runs.connect(uri).get_run(run_id).data.metrics
    assert metrics["system/system_memory_usage_megabytes"] > 0 and "system/disk_usage_percentage" in metrics
    assert mlflow_runs.connect(uri).get_run(cached).data.metrics == {}


def test_a_watch_that_fails_or_is_not_wanted_harms_nobody(caplog: pytest.LogCaptureFixture):
    looks = []

    def report(metrics, step):
        looks.append(step)
        raise RuntimeError("no")

    with watched(report, every=0):
        time.sleep(0.05)
    assert looks == []
    with watched(report, every=0.01):
        deadline = time.monotonic() + 60
        while len(looks) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(looks) >= 3 and caplog.text.count("system metrics are incomplete: no") == 1


@pytest.mark.parametrize(
    "wrong",
    [{"model": "a/b"}, {"alias": "latest"}, {"alias": "v3"}, {"alias": "a b"}, {"wait_at_end": -1}, {"wait_at_end": math.nan}, {"experiment": " "}],
)
def test_settings_that_mlflow_would_refuse_are_refused_first(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrackingConfig(**wrong)
