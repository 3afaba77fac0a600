"""What a run that failed leaves in its report's place."""

from __future__ import annotations

from pathlib import Path

from pipelines.graph.dag import PlannedStage, Stage
from pipelines.published import publish_failure
from pipelines.store import Manifest
from tasks.stage import UserError


class Seen:
    """The store and the tracker, as far as they are asked."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, str]] = []

    def finished(self, folder: Path) -> Manifest | None:
        if folder.name != "prompts-f":
            return None
        return Manifest("prompts", "prompts", 2, "f", {"seed": 0}, {}, {}, {"train": 64}, "2026-01-01T00:00:00+00:00", 1.5, "abc1", "c0ffee")

    def log_artifact(self, path: Path, folder: str) -> None:
        self.logged.append((path.name, folder))


def test_a_page_says_what_failed_what_is_finished_and_what_was_not_run(tmp_path: Path):
    planned = [
        PlannedStage(Stage(name, name.rpartition("/")[2], 1, "x:y", None), "f", tmp_path / f"{name.replace('/', '-')}-f", False, False, {}, {})
        for name in ("prompts", "base", "round1/distill", "report")
    ]
    failures = {"base": UserError("model.path: <none> there"), "round1/distill": RuntimeError("boom\nmore")}
    seen = Seen()
    publish_failure(failures, planned, seen, tmp_path, seen, title="x", server="http://127.0.0.1:5000")
    page = (tmp_path / "report.html").read_text()
    assert "<pre>model.path: &lt;none&gt; there</pre>" in page and "<pre>RuntimeError: boom</pre>" in page
    assert "Not run: report." in page and "1 stage, 2 s of work in all." in page
    assert '<a href="http://127.0.0.1:5000/#/runs/abc1">prompts</a>' in page
    assert len(page) < 20_000 and "<script" not in page  # no figure, no script
    assert seen.logged == [("report.html", "report")]


def test_a_page_that_cannot_be_written_hides_no_failure(tmp_path: Path, caplog):
    seen = Seen()
    publish_failure({"base": RuntimeError("boom")}, [], seen, tmp_path / "gone", seen, title="x", server=None)
    assert "could not be written" in caplog.text
