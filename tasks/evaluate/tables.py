"""From timed completions to result rows: totals, medians with their spread, prefill in and out, loops apart. Pure; no model, no files."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.completion_files import Completion

REFERENCES = ("transformers", "prompt_lookup")
Setting = tuple[str, int, int]  # method, block size, batch size


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

    def batches(self) -> list[list[Completion]]:
        """Rows that were decoded together: what a time was taken of."""
        found: dict[int, list[Completion]] = {}
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


def decode_tps(rows: Sequence[Completion]) -> float | None:
    """Without the first forward and what it committed; None where nothing came after it."""
    rows = [c for c in rows if c.forwards > 1]
    spent = sum(c.seconds - c.prefill_seconds for c in rows)
    return sum(len(c.tokens) - c.accepted_lengths[0] for c in rows) / spent if rows and spent > 0 else None


def decode_tpf(rows: Sequence[Completion]) -> float | None:
    forwards = sum(c.forwards - 1 for c in rows)
    return sum(len(c.tokens) - c.accepted_lengths[0] for c in rows) / forwards if forwards else None


def row(run: Run, against: dict[str, Run]) -> dict[str, Any]:
    """One result row, see docs/schemas.md. against: runs of the same batch size, by "ar" and the references' names, as far as there are."""
    found, ar = run.completions, against["ar"]
    method, block_size, batch_size = run.setting
    sound = [c for c in found if not c.degenerate]
    loops = [c for c in found if c.degenerate]
    same = {c.id for c in sound}
    ar_sound = [c for c in ar.completions if c.id in same]
    ar_loops = [c for c in ar.completions if c.id not in same]
    decoding, ar_decoding = decode_tps(found), decode_tps(ar.completions)
    return {
        "method": method,
        "block_size": block_size,
        "batch_size": batch_size,
        "prompts": len(found),
        "tokens": tokens(found),
        "forwards": sum(c.forwards for c in found),
        "seconds": seconds(found),
        "tpf": tpf(found),
        "tps": tps(found),
        "speedup": tps(found) / tps(ar.completions),
        **_spread("tpf", [tpf(batch) for batch in run.batches()]),
        **_spread("tps", [tps(batch) for batch in run.batches()]),
        **_spread("speedup", [tps(a) / tps(b) for a, b in zip(run.batches(), ar.batches(), strict=True)]),
        **{f"speedup_{name}": tps(found) / tps(against[name].completions) if name in against else None for name in REFERENCES},
        "prefill_seconds": sum(c.prefill_seconds for c in found),
        "decode_tpf": decode_tpf(found),
        "decode_tps": decoding,
        "decode_speedup": decoding / ar_decoding if decoding and ar_decoding else None,
        "stop_reasons": dict(Counter(c.stop_reason for c in found)),
        "degenerate": len(loops),
        "sound_tpf": tpf(sound) if sound else None,
        "sound_speedup": tps(sound) / tps(ar_sound) if sound else None,
        "degenerate_tpf": tpf(loops) if loops else None,
        "degenerate_speedup": tps(loops) / tps(ar_loops) if loops else None,
        "equals_ar": sum(c.difference is None for c in found) / len(found),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, and the quartiles around it, over prompts (over batches, where prompts were decoded together)."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {f"{name}_median": middle, f"{name}_q1": low, f"{name}_q3": high}


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
