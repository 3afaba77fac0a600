"""One small store for all tests of the app; whoever changes a file copies it first."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboards.made_store import STAGES, Made, fingerprint_of, make_store, write_results


@pytest.fixture(autouse=True)
def own_main() -> Iterator[None]:
    """Streamlit's AppTest leaves its script as `__main__`, which later tests would start again in every process they spawn."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_store(tmp_path_factory.mktemp("app") / "my outputs")


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Made:
    """A store to spoil."""
    shutil.copytree(made.outputs / "store", tmp_path / "outputs" / "store")
    return Made(tmp_path / "outputs")


@pytest.fixture(scope="session")
def tracked_runs(made: Made) -> Made:
    """Its tracking store, written by the pipeline's own tracker: a run that finished, one that failed."""
    from pipelines.tracking.settings import TrackingConfig
    from pipelines.tracking.tracker import Tracker

    settings = TrackingConfig(experiment="test", wait_at_end=0, system_metrics_every=0)
    where = {"tracking_uri": made.tracking_uri, "backlog": made.outputs / "backlog", "settings": settings}
    with Tracker.start(run_name="tiny", config={"seed": 0}, **where) as tracker:
        for stage_id in STAGES:
            with tracker.stage(stage_id, fingerprint=fingerprint_of(stage_id), params={}, cached=False):
                pass
        from mlflow import MlflowClient

        write_results(MlflowClient(made.tracking_uri), tracker.run_id)
    with pytest.raises(RuntimeError), Tracker.start(run_name="broken", config={}, **where):
        raise RuntimeError("boom")
    return made
