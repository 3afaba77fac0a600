"""The stage table of a dry run as text."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.estimate.forecast import UNKNOWN, Forecast
from pipelines.estimate.memory import Memory
from pipelines.graph.dag import PlannedStage

COLUMNS = ("stage", "state", "rows", "tokens", "GPUs", "GB each", "disk GB", "hours", "GPU-hours", "basis", "fingerprint")


def estimate_table(planned: Sequence[PlannedStage], forecast: Forecast) -> str:
    """One line per stage, totals of what is to run, and what the figures rest on."""
    lines = [_line(p, forecast) for p in planned]
    widths = [max(len(line[i]) for line in [COLUMNS, *lines]) for i in range(len(COLUMNS))]
    right = range(2, 9)
    text = [
        "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in [COLUMNS, *lines]
    ]
    return "\n".join([*text, "", *_totals(planned, forecast), *forecast.basis])


def _line(p: PlannedStage, forecast: Forecast) -> list[str]:
    estimate, state = forecast.stages[p.stage.id], forecast.states[p.stage.id]
    hours = None if estimate.seconds is None else estimate.seconds / 3600
    runs = state != "cached"
    return [
        p.stage.id,
        state,
        _count(estimate.rows),
        _count(estimate.tokens),
        f"{estimate.gpus:g}" if estimate.gpus else "-",
        _memory(estimate.memory) if runs else "-",
        _amount(estimate.disk_gb) if runs else "-",
        _amount(hours) if runs else "-",
        _amount(None if hours is None else hours * estimate.gpus) if runs and estimate.gpus else "-",
        ("measured" if estimate.measured else "declared") if runs else "-",
        "-" if state == UNKNOWN else p.fingerprint,
    ]


def _totals(planned: Sequence[PlannedStage], forecast: Forecast) -> list[str]:
    to_run = [forecast.stages[p.stage.id] for p in planned if forecast.states[p.stage.id] != "cached"]
    if not to_run:
        return ["everything is there: nothing to run"]
    unknown = sum(e.seconds is None for e in to_run)
    hours = sum(e.seconds or 0 for e in to_run) / 3600
    gpu_hours = sum((e.seconds or 0) * e.gpus for e in to_run) / 3600
    disk, scratch = sum(e.disk_gb or 0 for e in to_run), forecast.scratch_gb
    said = f"to run: {len(to_run)} stages, {_amount(hours)} hours one after another"
    said += f", {_amount(gpu_hours)} GPU-hours" if gpu_hours else ""
    said += f", {_amount(disk)} GB of disk, and {_amount(scratch)} more while it trains" if disk or scratch else ""
    said += f"; not counted: {unknown} stages of unknown length" if unknown else ""
    each = [e.memory for e in to_run if e.memory]
    lines = [said]
    if each:
        lines.append("GB each: of one GPU or worker = weights + optimizer and gradients + activations and logits + KV cache")
        if any(m.start >= m.total for m in each):
            lines.append(
                "         training: where the total is more than the four, it is reached while the whole model is loaded, before it is sharded"
            )
    return lines


def _memory(memory: Memory | None) -> str:
    if memory is None:
        return "-"
    parts = (memory.weights, memory.optimizer, memory.activations, memory.kv)
    return f"{_amount(memory.total)} = {' + '.join(map(_amount, parts))}"


def _count(number: float | None) -> str:
    if number is None:
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:,.0f}"


def _amount(number: float | None) -> str:
    if number is None:
        return "?"
    if number < 0.01:
        return "0" if number == 0 else "<.01"
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
