"""From timed completions to result rows: totals, medians with their spread, prefill in and out, loops apart. Pure; no model, no files."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.paper_table import REFERENCES
from tasks.completion_files import Completion

FEWEST_FOR_QUARTILES = 4  # values
Setting = tuple[str, int, int]  # method, block size, batch size
Batch = list[Completion]  # decoded together: what a time was taken of


@dataclass
class Run:
    """All prompts under one setting, in their order."""

    completions: list[Completion]

    @property
    def setting(self) -> Setting:
        return self.completions[0].setting

    @property
    def is_ours(self) -> bool:
        return self.setting[0] not in REFERENCES

    def batches(self) -> list[Batch]:
        found: dict[int, Batch] = {}
        for completion in self.completions:
            found.setdefault(completion.batch, []).append(completion)
        return list(found.values())


def runs_of(completions: Iterable[Completion]) -> list[Run]:
    """By setting: the smallest batch first; of each batch size greedy AR, then ours by method and block size, then the references."""
    found: dict[Setting, list[Completion]] = {}
    for completion in completions:
        found.setdefault(completion.setting, []).append(completion)
    runs = [Run(rows) for rows in found.values()]
    return sorted(runs, key=_rank)


def _rank(run: Run) -> tuple[int, bool, bool, str, int]:
    method, block_size, batch_size = run.setting
    return batch_size, method != "ar", not run.is_ours, method, block_size


def tokens(rows: Iterable[Completion]) -> int:
    return sum(len(c.tokens) for c in rows)


def seconds(rows: Iterable[Completion]) -> float:
    return sum(c.seconds for c in rows)


def tps(rows: Sequence[Completion]) -> float:
    return tokens(rows) / seconds(rows)


def tpf(rows: Sequence[Completion]) -> float:
    return tokens(rows) / sum(c.forwards for c in rows)


def _after_prefill(rows: Iterable[Completion]) -> int:
    """Tokens that came after the first forward."""
    return sum(sum(c.accepted_lengths[1:]) for c in rows)


def decode_tps(batches: Sequence[Batch]) -> float | None:
    """Without the first forward and what it committed; None where nothing came after it. A batch goes on as long as one of its rows does."""
    rows = [c for batch in batches if any(c.forwards > 1 for c in batch) for c in batch]
    spent = sum(c.seconds - c.prefill_seconds for c in rows)
    return _after_prefill(rows) / spent if rows and spent > 0 else None


def decode_tpf(rows: Sequence[Completion]) -> float | None:
    forwards = sum(c.forwards - 1 for c in rows if c.forwards)
    return _after_prefill(rows) / forwards if forwards else None


def _speedup(ours: Sequence[Batch], ar: Sequence[Batch], wanted: Callable[[Batch], bool]) -> float | None:
    """Over greedy AR, of the wanted batches alone; None where there are none. A batch's time is that of all its rows: it is counted whole or not."""
    pairs = [(a, b) for a, b in zip(ours, ar, strict=True) if wanted(a)]
    if not pairs:
        return None
    return tps([c for batch, _ in pairs for c in batch]) / tps([c for _, batch in pairs for c in batch])


def row(run: Run, against: dict[str, Run]) -> dict[str, Any]:
    """One result row, see docs/schemas.md. against: runs of the same batch size, by "ar" and the references' names, as far as there are."""
    found, ar = run.completions, against["ar"]
    method, block_size, batch_size = run.setting
    sound = [c for c in found if not c.degenerate]
    loops = [c for c in found if c.degenerate]
    batches, ar_batches = run.batches(), ar.batches()
    decoding, ar_decoding = decode_tps(batches), decode_tps(ar_batches)
    return {
        "method": method,
        "block_size": block_size,
        "batch_size": batch_size,
        "prompts": len(found),
        "batches": len(batches),
        "tokens": tokens(found),
        "forwards": sum(c.forwards for c in found),
        "seconds": seconds(found),
        "tpf": tpf(found),
        "tps": tps(found),
        "speedup": tps(found) / tps(ar.completions),
        **_spread("tpf", [tpf(batch) for batch in batches]),
        **_spread("tps", [tps(batch) for batch in batches]),
        **_spread("speedup", [tps(a) / tps(b) for a, b in zip(batches, ar_batches, strict=True)]),
        **{f"speedup_{name}": tps(found) / tps(against[name].completions) if name in against else None for name in REFERENCES},
        "prefill_seconds": sum(c.prefill_seconds for c in found),
        "decode_tpf": decode_tpf(found),
        "decode_tps": decoding,
        "decode_speedup": decoding / ar_decoding if decoding and ar_decoding else None,
        "stop_reasons": dict(Counter(c.stop_reason for c in found)),
        "degenerate": len(loops),
        "sound_tpf": tpf(sound) if sound else None,
        "sound_speedup": _speedup(batches, ar_batches, lambda batch: not any(c.degenerate for c in batch)),
        "degenerate_tpf": tpf(loops) if loops else None,
        "degenerate_speedup": _speedup(batches, ar_batches, lambda batch: all(c.degenerate for c in batch)),
        "equals_ar": sum(c.difference is None for c in found) / len(found),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median, and the quartiles around it, over prompts (over batches, where prompts were decoded together). No quartiles of fewer than 4."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) >= FEWEST_FOR_QUARTILES else (None,) * 3
    return {f"{name}_median": statistics.median(values), f"{name}_q1": low, f"{name}_q3": high}


def accepted_lengths(run: Run) -> dict[int, int]:
    """Tokens committed per forward -> number of forwards."""
    counts: Counter[int] = Counter()
    for completion in run.completions:
        counts.update(completion.accepted_lengths)
    return dict(sorted(counts.items()))


def differences(run: Run, name: Callable[[int], str]) -> list[dict[str, Any]]:
    """Every answer that is not greedy AR's. name: what a prompt id is called."""
    method, block_size, batch_size = run.setting
    where = {"method": method, "block_size": block_size, "batch_size": batch_size}
    return [
        {"problem_id": name(c.id), **where, "first_index": c.first_difference, "margin": c.margin, "kind": c.difference}
        for c in run.completions
        if c.difference is not None
    ]
