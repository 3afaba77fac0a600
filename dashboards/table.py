"""The results tables as text, markdown and HTML: lists of columns, three ways to print them. Standard library only.

Takes rows of `results.json`; knows nothing about where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

Row = Mapping[str, Any]


def number(key: str, spec: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(key) is None else format(row[key], spec)


def _quartiles(key: str, spec: str) -> Callable[[Row], str]:
    """Median and, in brackets, the quartiles around it, where there are enough values for them."""

    def cell(row: Row) -> str:
        if row.get(f"{key}_median") is None:
            return "-"
        middle, low, high = (None if row[f"{key}_{part}"] is None else format(row[f"{key}_{part}"], spec) for part in ("median", "q1", "q3"))
        return f"{middle}" if low is None else f"{middle} [{low}, {high}]"

    return cell


def solved(row: Row) -> str:
    """Solved of tried, e.g. 15/16: a bare 0.94 hides how few problems stand behind it."""
    if row["accuracy"] is None or not row["accuracy_prompts"]:
        return "-"
    return f"{round(row['accuracy'] * row['accuracy_prompts'])}/{row['accuracy_prompts']}"


def _millions(row: Row) -> str:
    return f"{row['train_tokens'] / 1e6:.2f}M" if row["train_tokens"] else "-"


Columns = list[tuple[str, Callable[[Row], str], bool]]  # (title, cell text, aligned left)
_SETTING: Columns = [
    ("model", lambda row: str(row["model"]), True),
    ("benchmark", lambda row: str(row["benchmark"]), True),
    ("method", lambda row: str(row["method"]), True),
    ("block", number("block_size", "d"), False),
    ("batch", number("batch_size", "d"), False),
]
COLUMNS: Columns = [
    *_SETTING,
    ("prompts", number("prompts", ",d"), False),
    ("tokens", number("tokens", ",d"), False),
    ("forwards", number("forwards", ",d"), False),
    ("TPF", number("tpf", ".2f"), False),
    ("tokens/s", number("tps", ",.1f"), False),
    ("speedup", number("speedup", ".2f"), False),
    ("accuracy", number("accuracy", ".3f"), False),
    ("solved", solved, False),
    ("= AR", number("equals_ar", ".3f"), False),
    ("trained", _millions, False),
    ("dtype", lambda row: str(row["dtype"]), True),
]

SPREAD: Columns = [
    *_SETTING,
    ("timed", number("batches", ",d"), False),
    ("TPF", _quartiles("tpf", ".2f"), False),
    ("tokens/s", _quartiles("tps", ",.1f"), False),
    ("speedup", _quartiles("speedup", ".2f"), False),
    ("vs transformers", number("speedup_transformers", ".2f"), False),
    ("vs prompt lookup", number("speedup_prompt_lookup", ".2f"), False),
    ("prefill s", number("prefill_seconds", ".2f"), False),
    ("TPF after it", number("decode_tpf", ".2f"), False),
    ("tokens/s after it", number("decode_tps", ",.1f"), False),
    ("speedup after it", number("decode_speedup", ".2f"), False),
]
SPREAD_LEGEND = (
    "timed: how many times were taken: of prompts, or of batches, where prompts were decoded together. Medians of these and, in brackets, their "
    "quartiles, where there are 4 at least. vs: tokens/s over those of transformers' "
    "greedy generate() and of its prompt lookup, same model, same process, totals over all prompts, capped ones included. "
    "prefill: the first forward (prompt and first draft); after it: without that forward and what it committed."
)


def _stops(reason: str) -> Callable[[Row], str]:
    return lambda row: format(row["stop_reasons"].get(reason, 0), ",d")


STOPS: Columns = [
    *_SETTING,
    ("eos", _stops("eos"), False),
    ("length", _stops("length"), False),
    ("loops", number("degenerate", ",d"), False),
    ("TPF without loops", number("sound_tpf", ".2f"), False),
    ("speedup without loops", number("sound_speedup", ".2f"), False),
    ("TPF of loops", number("degenerate_tpf", ".2f"), False),
    ("speedup of loops", number("degenerate_speedup", ".2f"), False),
]
STOPS_LEGEND = (
    "How answers ended: by end of text, or cut at the token limit. Loops repeat one n-gram to no end, which inflates TPF: the figures are given "
    "without them too. Of prompts decoded together a speedup counts whole batches: those without a loop, and those of loops alone."
)

TRIALS: Columns = [  # of a decoding search
    ("setting", lambda row: str(row["name"]), True),
    ("prompts", number("prompts", ",d"), False),
    ("tokens", number("tokens", ",d"), False),
    ("TPF", number("tpf", ".2f"), False),
    ("tokens/s", number("tps", ",.1f"), False),
]

LEGEND = (
    "TPF: tokens per forward, prefill counted. speedup: tokens/s over greedy AR of the same model in the same process. "
    "= AR: share of prompts whose tokens equal that greedy AR. trained: packed tokens of distillation."
)


def _cells(rows: Sequence[Row], columns: Columns = COLUMNS) -> list[list[str]]:
    return [[text(row) for _, text, _ in columns] for row in rows]


def text_table(rows: Sequence[Row], columns: Columns = COLUMNS) -> str:
    """Aligned plain text for a terminal, about 135 columns wide with COLUMNS; a rule separates the models, where rows have one."""
    titles = [title for title, _, _ in columns]
    cells = _cells(rows, columns)
    widths = [max(len(line[column]) for line in [titles, *cells]) for column in range(len(titles))]

    def line(values: Sequence[str]) -> str:
        padded = (value.ljust(width) if left else value.rjust(width) for value, width, (_, _, left) in zip(values, widths, columns, strict=True))
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [line(titles)]
    for number, (row, values) in enumerate(zip(rows, cells, strict=True)):
        if number == 0 or row.get("model") != rows[number - 1].get("model"):
            lines.append(rule)
        lines.append(line(values))
    return "\n".join(lines)


def markdown_table(rows: Sequence[Row], columns: Columns = COLUMNS) -> str:
    """A GitHub-flavoured table."""

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"

    rule = "|" + "|".join(":---" if left else "---:" for _, _, left in columns) + "|"
    return "\n".join([line([title for title, _, _ in columns]), rule, *map(line, _cells(rows, columns))])


def html_table(rows: Sequence[Row], columns: Columns = COLUMNS) -> str:
    """A `<table>`, every cell escaped; class "left" marks text columns."""

    def line(values: Sequence[str], tag: str) -> str:
        cells = (f"<{tag}{' class=left' if left else ''}>{escape(value)}</{tag}>" for value, (_, _, left) in zip(values, columns, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    head = line([title for title, _, _ in columns], "th")
    return f"<table><thead>{head}</thead><tbody>{''.join(line(values, 'td') for values in _cells(rows, columns))}</tbody></table>"


def told(rows: Sequence[Row], columns: Columns) -> Columns:
    """The columns that say something of any row."""
    return [column for column in columns if any(column[1](row) != "-" for row in rows)]


def version_notes(rows: Sequence[Row]) -> list[str]:
    """One sentence: the versions of the benchmarks that have one. Scores of different versions do not compare."""
    versions = {row["benchmark"]: row["benchmark_version"] for row in rows if row.get("benchmark_version") is not None}
    return [f"Benchmark versions: {', '.join(f'{name} {version:.1f}' for name, version in versions.items())}."] if versions else []


def unjudged_notes(rows: Sequence[Row]) -> list[str]:
    """One sentence per benchmark whose accuracy leaves prompts out: how many."""
    left = {row["benchmark"]: row.get("unjudged", 0) for row in rows if row["accuracy"] is not None}
    return [f"{count} prompts of {name} bring neither tests nor an answer; its accuracy leaves them out." for name, count in left.items() if count]


def small_sample_notes(rows: Sequence[Row]) -> list[str]:
    """One sentence per benchmark whose accuracy rests on fewer than 100 problems: how much a single one weighs."""
    sizes = {row["benchmark"]: row["accuracy_prompts"] for row in rows if row["accuracy"] is not None and row["accuracy_prompts"]}
    return [
        f"Accuracy on {benchmark} rests on {size} problems: one more or less moves it by {100 / size:.1f} points, so small differences mean nothing."
        for benchmark, size in sorted(sizes.items())
        if size < 100
    ]


def timed_on(machines: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence per machine that speed was measured on. machines: `{models, machine}`, as in results.json."""
    return [f"Speed of {', '.join(found['models'])} measured on {_machine(found['machine'])}." for found in machines]


def _machine(machine: Mapping[str, Any]) -> str:
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    where = f"{machine['cpu']}, {machine['cores']} cores, {gpus}"
    threads = f"{machine['torch_threads']} threads{' asleep while they wait' if machine.get('threads_sleep') else ''}"
    return f"{where} (device {machine['device']}, {threads}, torch {machine['torch']})"
