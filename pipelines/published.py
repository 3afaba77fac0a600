"""What a pipeline run leaves beside its log and in MLflow when it ends: its report or, where a stage failed, a page that says so."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dashboards.costs import link_runs
from pipelines.errors import summary, user_error
from pipelines.graph.dag import PlannedStage
from pipelines.store import Store
from pipelines.tracking.tracker import Tracker
from tasks.artifacts import write_text
from tasks.report import FIGURES

log = logging.getLogger(__name__)
PAGE = "report.html"
RESULTS = ("results.json", "results.md")


def publish(report: Path, output_dir: Path, tracker: Tracker, *, server: str | None) -> None:
    """Copies the report stage's files; the page's stages lead to their runs at `server`."""
    for name in RESULTS:
        shutil.copy(report / name, output_dir / name)
        tracker.log_artifact(output_dir / name, "report")
    _publish_page((report / PAGE).read_text(encoding="utf-8"), output_dir, tracker, server=server)
    for figure in sorted((report / FIGURES).glob("*.json")):
        tracker.log_artifact(figure, f"report/{FIGURES}")


def publish_failure(
    failures: Mapping[str, Exception],
    planned: Sequence[PlannedStage],
    store: Store,
    output_dir: Path,
    tracker: Tracker,
    *,
    title: str,
    server: str | None,
) -> None:
    """A page in the report's place: what failed, what of the run is finished, and what it took. Never raises: what failed is to be told."""
    from dashboards.page import failure_page

    try:
        finished = {p.stage.id: (p, manifest) for p in planned if (manifest := store.finished(p.folder)) is not None}
        stages = [asdict(manifest) | {"stage": stage, "folder": p.folder.name} for stage, (p, manifest) in finished.items()]
        absent = [p.stage.id for p in planned if p.stage.id not in finished and p.stage.id not in failures]
        told = {stage: user_error(error) or summary(error) for stage, error in failures.items()}
        _publish_page(failure_page(title, told, absent, stages), output_dir, tracker, server=server)
        log.info("what failed, and what is finished: %s", output_dir / PAGE)
    except Exception:
        log.exception("the page of the failed run could not be written")


def _publish_page(page: str, output_dir: Path, tracker: Tracker, *, server: str | None) -> None:
    write_text(output_dir / PAGE, link_runs(page, server) if server else page)
    tracker.log_artifact(output_dir / PAGE, "report")
