"""The results table as text, markdown and HTML: one list of columns, three ways to print it. Standard library only.

Takes rows of `results.json`; knows nothing about where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

Row = Mapping[str, Any]


def _number(key: str, spec: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[key] is None else format(row[key], spec)


def _solved(row: Row) -> str:
    """Solved of tried, e.g. 15/16: a bare 0.94 hides how few problems stand behind it."""
    if row["accuracy"] is None or not row["accuracy_prompts"]:
        return "-"
    return f"{round(row['accuracy'] * row['accuracy_prompts'])}/{row['accuracy_prompts']}"


def _millions(row: Row) -> str:
    return f"{row['train_tokens'] / 1e6:.2f}M" if row["train_tokens"] else "-"


# (title, cell text, aligned left)
COLUMNS: list[tuple[str, Callable[[Row], str], bool]] = [
    ("model", lambda row: str(row["model"]), True),
    ("benchmark", lambda row: str(row["benchmark"]), True),
    ("method", lambda row: str(row["method"]), True),
    ("block", _number("block_size", "d"), False),
    ("batch", _number("batch_size", "d"), False),
    ("prompts", _number("prompts", ",d"), False),
    ("tokens", _number("tokens", ",d"), False),
    ("forwards", _number("forwards", ",d"), False),
    ("TPF", _number("tpf", ".2f"), False),
    ("tokens/s", _number("tps", ",.1f"), False),
    ("speedup", _number("speedup", ".2f"), False),
    ("accuracy", _number("accuracy", ".3f"), False),
    ("solved", _solved, False),
    ("= AR", _number("equals_ar", ".3f"), False),
    ("trained", _millions, False),
    ("dtype", lambda row: str(row["dtype"]), True),
]

LEGEND = (
    "TPF: tokens per forward, prefill counted. speedup: tokens/s over greedy AR of the same model in the same process. "
    "= AR: share of prompts whose tokens equal that greedy AR. trained: packed tokens of distillation."
)


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [[text(row) for _, text, _ in COLUMNS] for row in rows]


def text_table(rows: Sequence[Row]) -> str:
    """Aligned plain text for a terminal, about 135 columns wide; a rule separates the models."""
    titles = [title for title, _, _ in COLUMNS]
    cells = _cells(rows)
    widths = [max(len(line[column]) for line in [titles, *cells]) for column in range(len(titles))]

    def line(values: Sequence[str]) -> str:
        padded = (value.ljust(width) if left else value.rjust(width) for value, width, (_, _, left) in zip(values, widths, COLUMNS, strict=True))
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [line(titles)]
    previous = None
    for row, values in zip(rows, cells, strict=True):
        if row["model"] != previous:
            lines.append(rule)
        previous = row["model"]
        lines.append(line(values))
    return "\n".join(lines)


def markdown_table(rows: Sequence[Row]) -> str:
    """A GitHub-flavoured table."""

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"

    rule = "|" + "|".join(":---" if left else "---:" for _, _, left in COLUMNS) + "|"
    return "\n".join([line([title for title, _, _ in COLUMNS]), rule, *map(line, _cells(rows))])


def html_table(rows: Sequence[Row]) -> str:
    """A `<table>`, every cell escaped; class "left" marks text columns."""

    def line(values: Sequence[str], tag: str) -> str:
        cells = (f"<{tag}{' class=left' if left else ''}>{escape(value)}</{tag}>" for value, (_, _, left) in zip(values, COLUMNS, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    head = line([title for title, _, _ in COLUMNS], "th")
    return f"<table><thead>{head}</thead><tbody>{''.join(line(values, 'td') for values in _cells(rows))}</tbody></table>"


def small_sample_notes(rows: Sequence[Row]) -> list[str]:
    """One sentence per benchmark whose accuracy rests on fewer than 100 problems: how much a single one weighs."""
    sizes = {row["benchmark"]: row["accuracy_prompts"] for row in rows if row["accuracy"] is not None and row["accuracy_prompts"]}
    return [
        f"Accuracy on {benchmark} rests on {size} problems: one more or less moves it by {100 / size:.1f} points, so small differences mean nothing."
        for benchmark, size in sorted(sizes.items())
        if size < 100
    ]
