"""Runs side by side as markdown: per group (experiment, size, benchmark) every model, method and block size, mean and range over seeds; acceptance,
machines, versions, commands. Links lead to files beside it, which it does not write."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dashboards import figures
from dashboards.evidence_rows import Run
from dashboards.paper_table import title
from dashboards.table import LEGEND, Columns, markdown_table, small_sample_notes, timed_on, told
from dashboards.verdicts import spread

POSITIONS = (1, 2, 4, 8, 16, 32, 64)
_SPREAD = "Several runs of a group differ in their seed: mean and, in brackets, range over them."
_METHODS = "MR and multi block work on fixed blocks; recycling, like running window, on a block that moves on with every accepted token."
_ACCEPTED = "Share of forwards that accept at least k draft tokens, last round."


def _of(key: str, spec: str, scale: float = 1.0) -> Any:
    return lambda row: spread([scale * value for value in row["runs"][key].dropna()], spec)


_LADDER: Columns = [
    ("method", lambda row: title(row), True),
    ("block", lambda row: str(row["block_size"]), False),
    ("runs", lambda row: str(len(row["runs"])), False),
    ("TPF", _of("tpf", ".2f"), False),
    ("tokens/s", _of("tps", ",.1f"), False),
    ("speedup", _of("speedup", ".2f"), False),
    ("accuracy %", _of("accuracy", ".1f", 100), False),
    ("M tokens trained", lambda row: _trained(row, "train_tokens", 1e-6, ".2f"), False),
    ("minutes trained", lambda row: _trained(row, "minutes", 1.0, ".1f"), False),
]
_MADE: Columns = [
    ("run", lambda row: f"[{row['name']}](data/{row['name']}.json)", True),
    ("seed", lambda row: _or_dash(row["seed"]), False),
    ("base's parameters", lambda row: f"{row['parameters']:,}" if row["parameters"] else "-", False),
    ("commit", lambda row: (row["git_sha"] or "-")[:12], True),
    ("torch", lambda row: row["torch"] or "-", True),
    ("transformers", lambda row: row["transformers"] or "-", True),
    ("command", lambda row: f"`{row['command']}`" if row["command"] else "-", True),
]

_PROBES: Columns = [
    ("model", lambda row: row["model"], True),
    ("step", lambda row: f"{row['step']:.0f}", False),
    ("packed tokens", lambda row: f"{row['tokens']:,.0f}", False),
    ("TPF", lambda row: f"{row['tpf']:.3f}", False),
    ("answers unchanged", lambda row: f"{row['equal_to_teacher']:.1%}", False),
]
_CHECKPOINTS: Columns = [
    ("run", lambda row: row["name"], True),
    ("model", lambda row: row["model"], True),
    ("file", lambda row: f"`{row['file']}`", True),
    ("sha256", lambda row: f"`{row['sha256']}`", True),
]
_REBUILT = (
    "Weights are not kept here. The run's command above builds them again; with other versions, or on another machine, the bytes may differ, the "
    "figures little."
)


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _trained(row: Mapping[str, Any], key: str, scale: float, spec: str) -> str:
    return "-" if row["model"] == "base" else _of(key, spec, scale)(row)


def ladder_markdown(rows: pd.DataFrame, runs: Mapping[str, Run], sweeps: Mapping[str, Mapping[str, Any]], pictures: Mapping[str, str]) -> str:
    """rows: of `run_rows`. pictures: group, or name of a run that was probed -> file of its figure."""
    parts = [
        "# Runs",
        "What they say about the paper's claims: [claims](claims.md).",
        f"{LEGEND} {_METHODS} {_SPREAD} Tokens and minutes: of all distillation since the base.",
    ]
    for group, of_group in rows[rows["batch_size"] == 1].groupby("group", sort=False) if len(rows) else ():
        members = {name: run for name, run in runs.items() if name in set(of_group["run"])}
        parts += [f"## {group}", *_group(str(group), of_group, members, pictures)]
    for name, points in probe_points(runs).items():
        parts += [f"## What training buys, {name}", *_bought(name, points, runs[name], pictures[name])]
    parts += ["## Commands and versions", *_commands(runs, sweeps)]
    if checkpoints := [row for name, run in runs.items() for row in _checkpoints(name, run)]:
        parts += ["## Converted checkpoints", _REBUILT, markdown_table(checkpoints, _CHECKPOINTS)]
    return "\n\n".join(parts) + "\n"


def _group(group: str, rows: pd.DataFrame, runs: Mapping[str, Run], pictures: Mapping[str, str]) -> Iterator[str]:
    yield f"Runs: {', '.join(f'[{name}](data/{name}.json)' for name in runs)}."
    if group in pictures:
        yield f"![Tokens per forward by decoding block size, {group}]({pictures[group]})"
    settings = ["model", "benchmark", "method", "block_size"]
    keyed = [dict(zip(settings, key, strict=True)) | {"runs": found} for key, found in rows.groupby(settings, sort=False)]
    yield markdown_table(keyed, told(keyed, _LADDER))
    yield from small_sample_notes(rows.to_dict("records"))
    if table := _acceptance(runs, str(rows["benchmark"].iloc[0])):
        yield from table
    yield "\n".join(f"* {line}" for line in dict.fromkeys(line for run in runs.values() for line in timed_on(run["timed_on"])))


def _acceptance(runs: Mapping[str, Run], benchmark: str) -> Sequence[str]:
    """By position in the draft, at every block size of plain Jacobi decoding; nothing where no run has it."""
    shares: dict[str, list[list[float]]] = {}
    for run in runs.values():
        for setting, forwards in run["made"]["accepted"].get(benchmark, {}).items():
            shares.setdefault(setting, []).append(figures.acceptance_shares({int(k): n for k, n in forwards.items()}))
    if not shares:
        return ()
    reached = [k for k in POSITIONS if any(len(found) >= k for several in shares.values() for found in several)]
    columns: Columns = [("setting", lambda row: row["setting"], True), *((f"k = {k}", _share(k), False) for k in reached)]
    return _ACCEPTED, markdown_table([{"setting": setting, "shares": several} for setting, several in shares.items()], columns)


def _share(k: int) -> Any:
    return lambda row: spread([100 * (found[k - 1] if len(found) >= k else 0.0) for found in row["shares"]], ".0f") + " %"


def _bought(name: str, points: pd.DataFrame, run: Run, picture: str) -> Iterator[str]:
    yield f"Greedy Jacobi decoding of the probe prompts, which nothing is trained on, while the run went on. {figures.fits_in_words(points)}"
    yield f"![Tokens per forward against training tokens, {name}]({picture})"
    probes = [{"model": model} | probe for model, found in run["made"]["probes"].items() for probe in found]
    yield markdown_table(probes, _PROBES)


def _checkpoints(name: str, run: Run) -> Iterator[dict[str, str]]:
    for model, weights in run["made"].get("checkpoints", {}).items():
        yield from ({"name": name, "model": model, "file": file, "sha256": digest} for file, digest in weights.items())


def _commands(runs: Mapping[str, Run], sweeps: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    made = [_made(name, run) for name, run in runs.items()]
    of_sweep = dict.fromkeys(("seed", "parameters", "transformers"))
    made += [{"name": name, "command": command(sweep["made"])} | sweep["made"] | of_sweep for name, sweep in sweeps.items()]
    yield markdown_table(made, told(made, _MADE))


def _made(name: str, run: Run) -> dict[str, Any]:
    torch = dict.fromkeys(str(entry["machine"]["torch"]) for entry in run["timed_on"])
    versions = {"torch": ", ".join(torch), "transformers": run.get("versions", {}).get("transformers")}
    return {"name": name, "git_sha": run["git_sha"], "command": command(run["made"])} | versions | run["made"]


def command(made: Mapping[str, Any]) -> str | None:
    """As it can be typed again; without the settings that name places on the machine."""
    if made["overrides"] is None:
        return None
    return shlex.join(["python", "-m", "pipelines.full_run", *(["-m"] if made.get("swept") else []), *made["overrides"]])


def probe_points(runs: Mapping[str, Run]) -> dict[str, pd.DataFrame]:
    """Name of a run -> its probes as `figures.tpf_by_tokens` takes them."""
    found = {}
    for name, run in runs.items():
        frames = [pd.DataFrame(probes).assign(model=model) for model, probes in run["made"].get("probes", {}).items()]
        if frames:
            found[name] = pd.concat(frames)
    return found


def drawn_rows(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Group -> rows as `figures.tpf_by_block_size` takes them: plain Jacobi decoding, mean over runs and, of several, the range."""
    shown = rows[(rows["batch_size"] == 1) & (rows["method"] == "jacobi")]
    found = {}
    for group, of_group in shown.groupby("group", sort=False):
        over_runs = of_group.groupby(["model", "method", "block_size"], sort=False)["tpf"]
        ranged = {"tpf_low": "min", "tpf_high": "max"} if of_group["run"].nunique() > 1 else {}
        found[str(group)] = over_runs.agg(**{"tpf": "mean"} | ranged).reset_index().replace({"model": {"cllm": "CLLM*"}})
    return found
