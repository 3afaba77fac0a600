"""A sweep's jobs side by side: one row per job, as terminal text and markdown (`sweep_page`: as HTML). Reads and writes no file.

A job is `{number, settings, error, rows, timed, noise, paper, times, sample, report}`:
    settings: what tells it from the others, `{override: value}`;
    error: why it has no results, one line, or None;
    rows: the rows of its `results.json`, or None;
    timed: of every prompt decoded alone, `{model or model/benchmark: {"method@block size": [(tokens, forwards)]}}`;
    noise: the noise ratios of its last round's packed blocks, `{edges, counts, mean}`, or None;
    paper: what the paper measured there, any of `{tpf, speedup, accuracy, window}`, or None;
    times: the content of its `timings.json`, or None;
    sample: an answer side by side with AR's, of its last model (`page.sample_html`), or None;
    report: its report, as seen from the sweep's folder, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dashboards.bootstrap import tpf_interval
from dashboards.paper_table import REFERENCES
from dashboards.table import Columns, Row, markdown_table, small_sample_notes, solved, text_table

Job = Mapping[str, Any]

PAPER_BENCHMARK = "human_eval"  # of the paper's ablations
MOST_SETTINGS = 6  # method x block size: columns of TPF a table has room for; else only the best is shown
BARS = "·▁▂▃▄▅▆▇█"
LEGEND = (
    "One row per job, and per benchmark where there are several: the model of its last round, decoded one prompt at a time. TPF: tokens per forward, "
    "prefill counted, by decoding method and block size; iter/token is one over it. speedup: tokens/s over greedy AR of the same model in the same "
    "process. = AR: smallest share of prompts whose tokens equal that greedy AR."
)
COMMON_LEGEND = (
    "Compare jobs at one block size, {name}, the best one over all jobs together; the best of a job is the largest of several noisy figures and so "
    "a little too large."
)
INTERVAL_LEGEND = (
    "In brackets: 95 % bootstrap interval of TPF over the {prompts} timed prompts. Jobs whose intervals overlap widely are not told apart."
)
NOISE_LEGEND = (
    "noise: the noise ratios of the packed blocks really produced, first those of exactly 0, then by tenths up to 1 (higher bar: more blocks), and "
    "their mean."
)


def sweep_rows(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Table rows, one per job and benchmark, before them the base where all jobs started from one. The keys of sweep.json's rows."""
    finished = [job for job in jobs if job["rows"]]
    bases = [[row for row in job["rows"] if row["model"] == "base"] for job in finished]
    rows = [row for job in jobs for row in _rows(job, last_model(job["rows"]))]
    common = _common_setting(rows)
    if finished and bases[0] and all(base == bases[0] for base in bases):
        shared = {"number": None, "settings": {}, "error": None, "noise": None, "paper": None, "rows": bases[0], "timed": finished[0]["timed"]}
        rows[:0] = _rows(shared, "base")
    for row in rows:
        row["common_setting"] = common
        row |= {f"common_{key}": row[key].get(common) for key in ("tpf", "tpf_interval", "speedup")}
    return rows


def _common_setting(rows: Sequence[Row]) -> str | None:
    """Of the settings that every job with results was decoded under, the one with the highest TPF over all of them: chosen once, and not for
    every job the one that came out best there."""
    tpfs = [row["tpf"] for row in rows if row["tpf"]]
    shared = [name for name in tpfs[0] if all(name in tpf for tpf in tpfs)] if tpfs else []
    return max(shared, key=lambda name: sum(tpf[name] for tpf in tpfs), default=None)


def last_model(rows: Sequence[Row] | None) -> str | None:
    """Of the last round."""
    rounds = [row["model"] for row in rows or [] if row["model"].removeprefix("round").isdecimal()]
    return max(rounds, key=lambda model: int(model.removeprefix("round")), default=None)


def _rows(job: Job, model: str | None) -> list[dict[str, Any]]:
    """One per benchmark; what belongs to the job as a whole stands in the first of them, the paper's figures beside its own benchmark."""
    benchmarks = list(dict.fromkeys(row["benchmark"] for row in job["rows"] or [] if row["model"] == model)) or [None]
    rows = [_row(job, model, benchmark) for benchmark in benchmarks]
    papers = PAPER_BENCHMARK if PAPER_BENCHMARK in benchmarks else benchmarks[0]
    for row in rows:
        row["noise"] = job["noise"] if row is rows[0] else None
        row["paper"] = job["paper"] if row["benchmark"] == papers else None
    return rows


def _row(job: Job, model: str | None, benchmark: str | None) -> dict[str, Any]:
    of_model = [row for row in job["rows"] or [] if (row["model"], row["benchmark"]) == (model, benchmark)]
    measured = [row for row in of_model if row["batch_size"] == 1 and row["method"] not in REFERENCES]
    parallel = [row for row in measured if row["method"] != "ar"]
    found: dict[str, Any] = {key: job[key] for key in ("number", "settings", "error")} | {"trained_model": model, "benchmark": benchmark}
    for key in ("tpf", "speedup"):
        found[key] = {f"{row['method']}@{row['block_size']}": row[key] for row in parallel}
    several = job["timed"] or {}
    timed = several.get(f"{model}/{benchmark}") or several.get(model, {})
    found["timed_prompts"] = measured[0]["prompts"] if measured else None
    found["tpf_interval"] = {name: tpf_interval(timed[name]) for name in found["tpf"] if name in timed}
    for key in ("tpf", "speedup"):
        best = max(parallel, key=lambda row: row[key], default={})
        found |= {f"best_{key}": best.get(key), f"best_{key}_block": best.get("block_size")}
    first = measured[0] if measured else {}
    found |= {key: first.get(key) for key in ("accuracy", "accuracy_prompts", "train_tokens")}
    found["equals_ar"] = min((row["equals_ar"] for row in parallel), default=None)
    found["loops"] = max((row.get("degenerate", 0) for row in measured), default=None)
    return found


def label(row: Mapping[str, Any]) -> str:
    """What a job is called in a figure: its settings' values."""
    return ", ".join(row["settings"].values()) or ("base" if row["number"] is None else f"job {row['number']}")


def labels(rows: Sequence[Row]) -> list[str]:
    """What rows are called in a figure: with the benchmark where there are several."""
    several = _several_benchmarks(rows)
    return [f"{label(row)}, {row['benchmark']}" if several and row["benchmark"] else label(row) for row in rows]


def _several_benchmarks(rows: Sequence[Row]) -> bool:
    return len({row["benchmark"] for row in rows if row["benchmark"]}) > 1


def columns(rows: Sequence[Row]) -> Columns:
    """Those that these rows have something to say in."""
    settings = list(dict.fromkeys(name for row in rows for name in row["settings"]))
    decoded = list(dict.fromkeys(name for row in rows for name in row["tpf"]))
    found: Columns = [("job", _job, True)]
    found += [(name, _setting(name), True) for name in settings]
    if _several_benchmarks(rows):
        found += [("benchmark", lambda row: row["benchmark"] or "-", True)]
    if len(decoded) <= MOST_SETTINGS:
        several = len({name.partition("@")[0] for name in decoded}) > 1
        found += [(f"TPF {name if several else name[name.index('@') :]}", _tpf(name), False) for name in decoded]
    else:
        found += [("best TPF", _best("tpf"), False)]
    common = rows[0]["common_setting"] if rows else None
    if common is not None:
        found += [(f"TPF {common}", _tpf(common), False)] * (len(decoded) > MOST_SETTINGS)
        found += [(f"speedup {common}", _plain("common_speedup", ".2f"), False)] * (len(decoded) > 1)
    found += [("best speedup", _best("speedup"), False)]
    found += [("accuracy", _percent("accuracy"), False), ("solved", _solved, False), ("= AR", _plain("equals_ar", ".3f"), False)]
    if any(row["loops"] for row in rows):
        found += [("loops", _plain("loops", ",d"), False)]
    found += [("trained tokens", _trained, False)]
    if any(row["noise"] for row in rows):
        found += [("noise", lambda row: sparkline(row["noise"]), True), ("mean", _noise_mean, False)]
    told = {key for row in rows for key in row["paper"] or {}}
    found += [(title, text, False) for key, title, text in _PAPER if key in told]
    return found


def _job(row: Row) -> str:
    return "base" if row["number"] is None else f"{row['number']}: no results" if row["error"] else str(row["number"])


def _setting(name: str) -> Callable[[Row], str]:
    return lambda row: row["settings"].get(name, "-")


def _tpf(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if name not in row["tpf"]:
            return "-"
        interval = row["tpf_interval"].get(name)
        return f"{row['tpf'][name]:.2f}" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")

    return cell


def _plain(key: str, spec: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else format(row[key], spec)


def _trained(row: Row) -> str:
    return f"{row['train_tokens']:,}" if row["train_tokens"] else "-"


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else f"{100 * row[key]:.1f}"


def _best(key: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[f"best_{key}"] is None else f"{row[f'best_{key}']:.2f} @{row[f'best_{key}_block']}"


def _solved(row: Row) -> str:
    return "-" if row["accuracy"] is None else solved(row)


def _noise_mean(row: Row) -> str:
    return f"{row['noise']['mean']:.2f}" if row["noise"] else "-"


def _paper_tpf(row: Row) -> str:
    paper = row["paper"]
    return "-" if not paper else f"{paper['tpf']:.2f} (w={paper['window']})"


_PAPER = (
    ("tpf", "paper TPF", _paper_tpf),
    ("speedup", "paper speedup", lambda row: f"{row['paper']['speedup']:.1f}" if row["paper"] else "-"),
    ("accuracy", "paper accuracy", lambda row: f"{100 * row['paper']['accuracy']:.1f}" if row["paper"] else "-"),
)


def sparkline(noise: Mapping[str, Any] | None) -> str:
    """A histogram in one word, the highest bar full."""
    if noise is None:
        return "-"
    top = max(noise["counts"])
    steps = len(BARS) - 1
    return "".join(BARS[-(-count * steps // top)] for count in noise["counts"])


def notes(rows: Sequence[Row], about: Sequence[str]) -> list[str]:
    """What must be known to read the table, first what is given as `about`; one sentence says whether all jobs trained on as many tokens."""
    trained = {row["train_tokens"] for row in rows if row["train_tokens"]}
    found = [*about, LEGEND]
    if any(len(row["tpf"]) > 1 for row in rows) and rows[0]["common_setting"] is not None:
        found.append(COMMON_LEGEND.format(name=rows[0]["common_setting"]))
    if prompts := [row["timed_prompts"] for row in rows if any(row["tpf_interval"].values())]:
        found.append(INTERVAL_LEGEND.format(prompts=min(prompts)))
    if any(row["loops"] for row in rows):
        found.append("loops: timed answers that repeat one n-gram to no end, which inflates TPF and speedup.")
    if any(row["noise"] for row in rows):
        found.append(NOISE_LEGEND)
    if len(trained) == 1 and sum(bool(row["train_tokens"]) for row in rows) > 1:
        found.append(f"Every job trained on the same number of packed tokens: {trained.pop():,}.")
    elif len(trained) > 1:
        found.append(
            f"The jobs trained on different numbers of packed tokens, {min(trained):,} to {max(trained):,}: they are no comparison at equal cost."
        )
    found += [f"Job {row['number']} has no results: {row['error']}" for row in rows if row["error"]]
    return [*found, *small_sample_notes([row for row in rows if row["benchmark"]])]


def sweep_text(rows: Sequence[Row]) -> str:
    return text_table(rows, columns(rows))


def sweep_markdown(rows: Sequence[Row], *, title: str, about: Sequence[str]) -> str:
    return "\n\n".join([f"# {title}", markdown_table(rows, columns(rows)), *notes(rows, about)]) + "\n"
