"""MATH-500: 500 test problems of MATH (Hendrycks et al. 2021), chosen by Lightman et al. 2023, "Let's Verify Step by Step" (MIT licence).

Zero-shot with evalchemy's message, word for word; from a local copy of `test.jsonl` or from the hub. Answers are read by answers.py.
"""

from __future__ import annotations

from dataclasses import replace

from tasks.problem_sets.benchmark_rows import benchmark_rows
from tasks.problem_sets.problem import Question
from tasks.row_files import HubPart

HUB_ID, PART = "HuggingFaceH4/MATH-500", HubPart(split="test")
ROWS = 500
MESSAGE = "Problem: {question}\nMark your solution with \\boxed\nAnswer:"


def load(path: str | None = None, *, revision: str | None = None, setting: str = "data.path") -> list[Question]:
    """The problems of data with MATH-500's schema (a file, a folder, a hub id and its revision); None reads it from the hub.

    Raises UserError for missing data or a bad row, with its number.
    """
    part = replace(PART, revision=revision)
    rows = benchmark_rows(path or HUB_ID, key="unique_id", texts=("problem", "answer"), part=part, setting=setting, most=ROWS)
    return [
        Question(problem_id=row["unique_id"], prompt=MESSAGE.format(question=row["problem"]), question=row["problem"], answer=row["answer"])
        for row, _ in rows
    ]
