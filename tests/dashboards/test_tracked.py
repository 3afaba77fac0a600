"""The app finds what the pipeline's tracker recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards import tracked
from dashboards.stored import Unreadable
from tests.dashboards.made_store import STAGES, Made, fingerprint_of, results


def test_runs_their_stages_and_results(tracked_runs: Made):
    client = tracked.connect(tracked_runs.tracking_uri)
    broken, finished = tracked.pipeline_runs(client)  # the newest first
    assert (finished.name, finished.status, broken.name, broken.status) == ("tiny", "FINISHED", "broken", "FAILED")
    assert tracked.stages(client, finished) == {stage_id: fingerprint_of(stage_id) for stage_id in STAGES}
    assert tracked.stages(client, broken) == {}
    assert tracked.results(client, finished) == results()
    assert len(tracked.rows(results(), finished)) == len(results()["rows"])
    with pytest.raises(Unreadable, match=r"Run broken .* has no report/results.json: it did not reach its report"):
        tracked.results(client, broken)


def test_a_missing_database_is_a_sentence_and_stays_missing(tmp_path: Path):
    with pytest.raises(Unreadable, match="There is no tracking store"):
        tracked.connect(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_does_not_answer_is_a_sentence():
    with pytest.raises(Unreadable, match="cannot be read"):
        tracked.pipeline_runs(tracked.connect("http://127.0.0.1:9"))
