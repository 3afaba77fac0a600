"""OpenThoughts2 (open-thoughts/OpenThoughts2-1M, Apache-2.0): questions with a reasoning model's answer.

There is no math split and no domain column: which rows are math is told by `source` alone, so an allow-list of sources must be given.
The prompt is the user's turn of `conversations`, exactly what the reasoning model was asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tasks.prepare_prompts.config import Draft
from tasks.row_files import RowFile
from tasks.stage import UserError

READ = ("conversations", "source")
ALSO = ("question",)  # in the schema; the user's turn is what was asked
FIRST_ROWS = 100  # among these a conversation of another form is a wrong schema; later ones are dropped and counted


def open_thoughts_drafts(allowed: Sequence[str], files: Iterator[RowFile], dropped: Counter[str]) -> Iterator[Draft]:
    """Rows of the allowed sources; `dropped` gains one per other row. Raises UserError, listing the sources that there are, for a source
    that is nowhere and for an empty list."""
    seen: Counter[str] = Counter()
    for file in files:
        file.require(*READ, *ALSO)
        for number, row in file.read(READ if allowed else READ[1:]):
            source = row.get("source") if isinstance(row, dict) else None
            seen[str(source)] += 1
            if not allowed:
                continue
            if source not in allowed:
                dropped["source"] += 1
                continue
            question = _question(row.get("conversations"))
            if question is None:
                if number <= FIRST_ROWS:
                    needed = "exactly one user and one assistant turn, each with `from` and `value`"
                    raise UserError(f"{file.where}, row {number}: field 'conversations' needs {needed}")
                dropped["unreadable"] += 1
                continue
            yield Draft([{"role": "user", "content": question}], {"problem_set": "open_thoughts", "source": source})
    missing = [name for name in allowed if not seen[name]]
    if seen and (missing or not allowed):
        listed = ", ".join(f"{name} ({count})" for name, count in seen.most_common())
        problem = f"{', '.join(missing)} is nowhere in the data" if missing else "is empty: name the sources to keep"
        raise UserError(f"data.open_thoughts_sources: {problem}; the sources (rows) are {listed}")


def _question(turns: Any) -> str | None:
    if not (isinstance(turns, list) and len(turns) == 2 and all(isinstance(turn, dict) for turn in turns)):
        return None
    if [turn.get("from") for turn in turns] != ["user", "assistant"]:
        return None
    value = turns[0].get("value")
    return value if isinstance(value, str) and value else None
