"""MBPP, the 500 test problems (task_id 11 to 510) of Austin et al. 2021, "Program Synthesis with Large Language Models".

The message is evalchemy's, word for word: three solved problems (task_id 2, 3, 4), then the problem, each with its three asserts. The
sanitized and "plus" versions are other sets with other problems. Data: CC-BY-4.0, (c) Google, from a local copy of `mbpp.jsonl` (all 974
rows) or from the hub. Only reads problems; completions are judged by scoring.py.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from tasks.problem_sets.benchmark_rows import benchmark_rows
from tasks.problem_sets.problem import Problem
from tasks.row_files import HubPart, is_hub_id
from tasks.stage import UserError

HUB_ID, SUBSET = "google-research-datasets/mbpp", "full"
HUB_SPLITS = ("prompt", "test")  # the solved problems are in the first
SHOTS, TESTED = (2, 3, 4), range(11, 511)
MESSAGE = (
    "Please refer the given examples and generate a python function for my problem.\n"
    "Examples are listed as follows:\n{shots}\n\nHere is my problem:\n{problem}"
)
PROBLEM = ">>> Problem:\n{text}\n>>> Test Cases:\n{tests}\n"
SOLVED = "- Example {number}:\n" + PROBLEM + "\n>>> Code:\n```python\n{code}\n```"


def load(path: str | None = None, *, revision: str | None = None, setting: str = "data.path") -> list[Problem]:
    """The test problems in data with MBPP's schema (a file, a folder, a hub id and its revision); None reads it from the hub.

    `tests` begin with the set-up code of a problem, where it has some.

    Raises:
        UserError: the data is missing, a row is bad (with its number), or there is no test problem or no solved one to show.
    """
    place = path or HUB_ID
    in_splits = is_hub_id(place) or Path(place, "dataset_dict.json").is_file()
    parts = [HubPart(SUBSET, split, revision) for split in HUB_SPLITS] if in_splits else [None]
    rows: dict[int, tuple[dict[str, Any], str]] = {}
    for part in parts:
        fields = {"texts": ("text", "code"), "lists": ("test_list",), "optional": ("test_setup_code",)}
        for row, where in benchmark_rows(place, key="task_id", **fields, part=part, setting=setting):
            rows[int(row["task_id"])] = row, where
    if missing := [number for number in SHOTS if number not in rows]:
        raise UserError(f"{setting}={place}: has no row with task_id {missing[0]}, which every prompt shows; give the whole set (mbpp.jsonl)")
    shots = "\n\n".join(_solved(i, rows[number][0]) for i, number in enumerate(SHOTS, start=1))
    problems = [_problem(row, where, shots) for number, (row, where) in sorted(rows.items()) if number in TESTED]
    if not problems:
        raise UserError(f"{setting}={place}: has no test problem (task_id {TESTED.start} to {TESTED.stop - 1}); give the whole set (mbpp.jsonl)")
    return problems


def _solved(number: int, row: dict[str, Any]) -> str:
    code = row["code"].replace("\r", "").replace("\t", "    ")
    return SOLVED.format(number=number, text=row["text"].strip(), tests="\n".join(row["test_list"]), code=code)


def _problem(row: dict[str, Any], where: str, shots: str) -> Problem:
    code = row["code"].replace("\r", "")
    tests = [row.get("test_setup_code") or "", *row["test_list"]]
    return Problem(
        problem_id=f"Mbpp/{row['task_id']}",  # as evalplus names them
        prompt=MESSAGE.format(shots=shots, problem=PROBLEM.format(text=row["text"].strip(), tests="\n".join(row["test_list"]))),
        entry_point=_entry_point(code, row["test_list"], where),
        tests="\n".join(tests).replace("\r", "") + "\n",
        solution=code,
    )


def _entry_point(code: str, tests: list[str], where: str) -> str:
    """The function or class of the reference code that the asserts call."""
    try:
        defined = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        called = [node.func.id for node in ast.walk(ast.parse("\n".join(tests))) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    except SyntaxError as error:
        raise UserError(f"{where}: code or test_list is no Python ({error.msg}); repair the row") from None
    found = [name for name in called if name in defined]
    if not found:
        raise UserError(f"{where}: test_list calls nothing that code defines ({', '.join(defined) or 'no function'}); repair the row")
    return found[0]
