"""A report and a sweep's page as a pipeline writes them, from the small store and from hand-made results."""

from __future__ import annotations

from pathlib import Path

from dashboards.sweep import sweep_rows
from dashboards.sweep_page import sweep_figures, sweep_page
from tasks import artifacts, excerpts, report
from tasks.completion_files import Completion, part_file, write_completions
from tasks.stage import StageContext
from tests.dashboards.made_store import ACCEPTED, Made
from tests.results import ar_row, row, trained_row, write_evaluation

HOSTILE = "print('<script>alert(1)</script>')"
SAMPLE = {"problem_id": "minicode/7", "prompt": "Write f.", "ar": HOSTILE, "jacobi": HOSTILE, "judged_by": "tests", "passed": True}
LATENCY = {
    "dtype": "float32",
    "free_ratio": 1.1,
    "curves": [
        {"batch_size": b, "context": 128, "tokens": [1, 2, 4, 8], "seconds": [0.002, 0.002, 0.003, 0.005], "knee": 2.0, "free_tokens": 2}
        for b in (1, 4)
    ],
}


def report_inputs(made: Made, folder: Path) -> dict[str, Path]:
    """Those of the report stage: results of base and one round, and the excerpts of all stages of the store."""
    rows = {"base": [ar_row(), row()], "round1": [ar_row(model="round1"), *(trained_row("round1", b, b / 4, accuracy=0.9) for b in (8, 16))]}
    inputs = {f"evaluate/{m}": write_evaluation(folder / m, m, rows[m], samples=[SAMPLE], accepted_lengths={"jacobi@16": ACCEPTED[m]}) for m in rows}
    stages = {f"stage/{name}": made.stage(name) for name in ("prompts", "base", "round1/trajectories", "round1/pack", "round1/distill")}
    for model, accepted in {"base": [1] * 9, "round1": [1, 4, 4]}.items():
        timed = [Completion(3, m, b, 1, 0, 4, [7] * 9, "", "eos", len(n), n, 1.0, 0.1) for m, b, n in (("ar", 1, [1] * 9), ("jacobi", 8, accepted))]
        stages[f"stage/{model}/speed"] = folder / f"{model}-speed"
        stages[f"stage/{model}/speed"].mkdir()
        write_completions(part_file(stages[f"stage/{model}/speed"], "speed", 0), timed, metadata={})
    for name, write in {"excerpts": lambda place: None, "latency": lambda place: artifacts.write_json(place / "latency.json", LATENCY)}.items():
        inputs[name] = folder / name
        inputs[name].mkdir()
        write(inputs[name])
    excerpts.run(excerpts.ExcerptsConfig(), stages, inputs["excerpts"], StageContext())
    return inputs | {"distill/round1": made.stage("round1/distill"), "export/final": made.stage("base")}


def write_report(made: Made, folder: Path) -> Path:
    """The page; its figures lie beside it."""
    report.run(report.ReportConfig(experiment="tiny"), report_inputs(made, folder), folder, StageContext())
    return folder / "report.html"


def sweep_jobs() -> list[dict]:
    """Two schedules at two windows, and a job that failed."""
    noise = {"edges": [i / 10 for i in range(11)], "counts": [4, *range(9), 8], "mean": 0.66}
    times = {"run": {"seconds": 61.5, "useful": 50.0}, "stages": {"prompts": {"cached": True}, "round1/distill": {"cached": False}}}
    jobs = []
    for number, (schedule, window, tpf) in enumerate([("linear", 8, 2.0), ("linear", 16, 2.4), ("reverse", 8, 1.5), ("reverse", 16, 1.4)]):
        rows = [ar_row(), row(), ar_row(model="round1"), *(trained_row("round1", b, tpf + b / 64, accuracy=0.9) for b in (16, 64))]
        timed = {"round1": {f"jacobi@{b}": [(60, 60 / tpf + i % 3) for i in range(9)] for b in (16, 64)}}
        settings = {"noise_schedule": schedule, "rounds.0.window": str(window)}
        found = {"number": number, "settings": settings, "error": None, "rows": rows, "timed": timed, "noise": noise, "times": times}
        paper = {"tpf": 2.1, "accuracy": 0.83, "window": window} if schedule == "linear" else None
        jobs.append(found | {"paper": paper, "sample": SAMPLE | {"model": "round1", "benchmark": "minicode"}, "report": f"{number}/report.html"})
    absent = dict.fromkeys(("rows", "timed", "noise", "paper", "times", "sample", "report"))
    return [*jobs, {"number": 4, "settings": {"noise_schedule": "random", "rounds.0.window": "8"}, "error": "no <memory>", **absent}]


def write_sweep_page(folder: Path) -> Path:
    jobs = sweep_jobs()
    rows = sweep_rows(jobs)
    path = folder / "sweep.html"
    path.write_text(sweep_page(rows, jobs, sweep_figures(rows), title="Sweep", about=["All jobs: experiment=x"]), encoding="utf-8")
    return path
