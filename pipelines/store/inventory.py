"""The store as a table: one line per stage folder, with the runs that use it. And sizes and ages as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipelines.store.disk import Entry, Store
from pipelines.store.uses import recorded

SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
SHOWN_RUNS = 3


def table(store: Store) -> list[str]:
    """The lines of `list`, a header first and the sums last."""
    entries = store.entries()
    runs: dict[str, list[str]] = {}
    for use, age in recorded(store).values():
        for name in use.stages.values():
            label = f"{use.run} (running)" if use.is_running(age) else use.run
            if label not in runs.setdefault(name, []):
                runs[name].append(label)
    rows = [_row(entry, runs.get(entry.name, [])) for entry in entries]
    states = {state: sum(entry.state == state for entry in entries) for state in sorted({entry.state for entry in entries})}
    counts = ", ".join(f"{count} {state}" for state, count in states.items()) or "nothing in it"
    return [*aligned([("kind", "stage", "folder", "state", "size", "age", "used by"), *rows]), f"{counts}; {size_text(sum(e.size for e in entries))}"]


def _row(entry: Entry, runs: Sequence[str]) -> tuple[str, ...]:
    used_by = ", ".join(runs[:SHOWN_RUNS]) + (f" and {len(runs) - SHOWN_RUNS} more" if len(runs) > SHOWN_RUNS else "")
    stage = entry.manifest.stage if entry.manifest else "-"
    return entry.kind or "-", stage, entry.name, entry.state, size_text(entry.size), age_text(entry.age), used_by or "-"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def size_text(size: float) -> str:
    unit = next((unit for unit, bytes_ in reversed(SIZES.items()) if size >= bytes_), "B")
    return f"{size / SIZES[unit]:.3g} {unit}" if size < 1000 * SIZES[unit] else f"{size / SIZES[unit]:.0f} {unit}"


def age_text(seconds: float) -> str:
    unit = next((unit for unit in ("d", "h", "m") if seconds >= AGES[unit]), "s")
    return f"{max(0, seconds) / AGES[unit]:.0f}{unit}"


def size_of(text: str) -> int:
    """Bytes from "20GB". Raises ValueError."""
    return int(_measured(text.upper(), SIZES))


def age_of(text: str) -> float:
    """Seconds from "30d". Raises ValueError."""
    return _measured(text.lower(), AGES)


def _measured(text: str, units: dict[str, int]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if not match or match[2] not in units:
        raise ValueError(f"expected a number and one of {', '.join(units)}, got {text!r}")
    return float(match[1]) * units[match[2]]
