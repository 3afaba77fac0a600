"""What a sweep ends in: one table over its jobs, printed, in the sweep's folder and in its MLflow run. A Hydra callback of every multirun.

Reads the `job.json` and `results.json` of every job and, from the store, what every timed prompt took and the noise histogram of its last round.
"""

from __future__ import annotations

import logging
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from dashboards.paper_numbers import LEGENDS, check_table, paper_cell
from pipelines import sweep_jobs
from pipelines.credentials import restored
from pipelines.graph.timings import TIMINGS
from pipelines.job_record import JOB
from pipelines.store import MANIFEST, Damaged, open_store
from pipelines.store.uri import is_remote
from tasks.artifacts import read_json, write_json, write_text
from tasks.completion_files import read_completions
from tasks.report import FIGURES, write_figures
from tasks.stage import UserError

FILES = ("sweep.md", "sweep.html", "sweep.json")
SCHEMA_VERSION = 1

log = logging.getLogger(__name__)


class SweepTable(Callback):
    """paper: which of the paper's tables stands beside our numbers: None, "table4" (schedule x window) or "table5" (mask)."""

    def __init__(self, paper: str | None = None) -> None:
        check_table(paper)  # before the first job, not after the last
        self.paper = paper

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from pipelines.tracking.tracker import SWEEP_MEMORY

        folder = Path(config.hydra.sweep.dir).resolve()
        sweep_jobs.begin(folder, list(config.hydra.overrides.task))
        (folder / SWEEP_MEMORY).unlink(missing_ok=True)  # a sweep begun again is a run of its own: what failed before is no job of it

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Never raises: what the jobs computed, and the exit code, do not depend on a table."""
        try:
            folder = Path(config.hydra.sweep.dir).resolve()
            for line in sweep_jobs.told(folder):
                print(f"sweep:     {line}", flush=True)
            written = write_sweep(folder, paper=self.paper)
            _record(folder, FILES if written else (), config=config)
        except Exception:
            log.exception("the sweep's table could not be made; its jobs are not affected")


def write_sweep(folder: Path, *, paper: str | None) -> bool:
    """Writes FILES into a sweep's folder and prints the table; False, and nothing, where no job was to give results (dry_run, until)."""
    from dashboards.sweep import notes, sweep_markdown, sweep_rows, sweep_text
    from dashboards.sweep_page import sweep_figures, sweep_page

    jobs, shared = read_jobs(folder, paper=paper)
    if not any(job["rows"] for job in jobs):
        return False
    rows = sweep_rows(jobs)
    title, about = f"Sweep {folder.parent.name} {folder.name}", [f"All jobs: {' '.join(shared)}", *([LEGENDS[paper]] if paper else [])]
    write_text(folder / "sweep.md", sweep_markdown(rows, title=title, about=about))
    shown = sweep_figures(rows)
    write_text(folder / "sweep.html", sweep_page(rows, jobs, shown, title=title, about=about))
    write_figures(folder, shown)
    write_json(folder / "sweep.json", {"schema_version": SCHEMA_VERSION, "shared": shared, "paper": paper, "rows": rows})
    print(f"\n{title}\n\n{sweep_text(rows)}\n")
    for note in notes(rows, about):
        print(textwrap.fill(note, width=135))
    print(f"sweep:     {folder / 'sweep.html'}", flush=True)
    return True


def read_jobs(folder: Path, *, paper: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """The jobs as `dashboards.sweep` takes them, by number, and the overrides that all of them share."""
    records = sorted(((read_json(path), path.parent) for path in folder.glob(f"*/{JOB}")), key=lambda found: found[0]["number"])
    overrides = [record["overrides"] for record, _ in records]
    shared = [text for text in overrides[0] if all(text in others for others in overrides)] if overrides else []
    jobs = []
    for record, place in records:
        results = place / "results.json"
        finished = record["state"] == "finished" and results.exists()
        why = record["error"] or ("has not ended" if record["state"] == "unfinished" else "stopped before the report")
        jobs.append(
            {
                "number": record["number"],
                "settings": dict(text.split("=", 1) for text in record["overrides"] if text not in shared and "=" in text),
                "error": None if finished else why,
                "rows": read_json(results)["rows"] if finished else None,
                "timed": _timed(record) if finished else None,
                "noise": _noise(record),
                "paper": paper_cell(paper, record["config"]) if record["config"] else None,
                "times": read_json(place / TIMINGS) if (place / TIMINGS).exists() else None,
                "sample": _sample(record) if finished else None,
                "report": f"{place.name}/report.html" if (place / "report.html").exists() else None,
            }
        )
    return jobs, shared


def _timed(record: Mapping[str, Any]) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """Tokens and forwards of every prompt that was timed alone, by model and "method@block size"."""
    found: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for stage in record["stages"]:
        model, _, kind = stage.rpartition("/")
        if kind != "speed":
            continue
        for completion in read_completions(_at_hand(record, stage), "speed"):
            if completion.batch_size == 1:
                name = f"{completion.method}@{completion.block_size}"
                found.setdefault(model, {}).setdefault(name, []).append((len(completion.tokens), completion.forwards))
    return found


def _noise(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the last round; None where it was not packed."""
    packed = [stage for stage in record["stages"] if stage.startswith("round") and stage.endswith("/pack")]
    try:
        folder = _at_hand(record, packed[-1]) if packed else None
    except Damaged:
        return None
    if folder is None or not (folder / MANIFEST).exists():
        return None
    noise = read_json(folder / "noise.json")
    return {"edges": noise["edges"], "counts": noise["counts"], "mean": read_json(folder / MANIFEST)["metrics"]["noise_ratio_mean"]}


def _sample(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first answer of the last round's evaluation; None where there is none any more."""
    judged = [stage for stage in record["stages"] if stage.startswith("round") and stage.endswith("/evaluate") and stage.count("/") == 1]
    if not judged:
        return None
    try:
        found = read_json(_at_hand(record, judged[-1]) / "evaluation.json")
    except (Damaged, UserError):
        return None
    return next(({"model": found["model"], "benchmark": found["benchmark"]} | sample for sample in found["samples"]), None)


def _at_hand(record: Mapping[str, Any], stage: str) -> Path:
    """The folder of a job's stage; of a store on object storage it is fetched first, which raises Damaged where it is not finished."""
    folder, uri = Path(record["stages"][stage]), record["config"]["paths"]["store"]
    if is_remote(uri):
        open_store(uri, work=folder.parent, read_only=True).fetch(folder)
    return folder


def _record(folder: Path, files: Sequence[str], *, config: DictConfig) -> None:
    """What the sweep's MLflow run gets at its end: the files, and its state, since a job whose config is wrong has no run of its own."""
    from pipelines.tracking.backlog import SUFFIX
    from pipelines.tracking.channel import Channel
    from pipelines.tracking.tracker import SWEEP_MEMORY

    memory = folder / SWEEP_MEMORY
    if not memory.exists():
        return
    sweep = read_json(memory)
    run = sweep["run_id"]
    uri = restored(sweep["tracking_uri"], config.paths.tracking_uri)
    channel = Channel(uri, sweep["experiment"], Path(sweep["backlog"], f"{sweep['handle']}{SUFFIX}"))
    for name in files:
        channel.send("log_file", run=run, path=str(folder / name), folder="sweep")
    for figure in sorted((folder / FIGURES).glob("*.json")) if files else []:
        channel.send("log_file", run=run, path=str(figure), folder=f"sweep/{FIGURES}")
    jobs = list(sweep_jobs.records(folder))
    wrong = [sweep_jobs.named(folder, job["number"], job["overrides"]) for job in jobs if job["state"] != "finished"]
    if wrong:
        tags = {"failed": "; ".join(wrong)[:5000], "jobs": str(len(jobs))}
        channel.send("end_run", run=run, status="FAILED", ended=int(time.time() * 1000), tags=tags)
    channel.close(config.tracking.wait_at_end)
