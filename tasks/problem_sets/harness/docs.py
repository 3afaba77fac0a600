"""What our task files name: where their documents come from, and how an answer is judged.

lm-eval calls a `..._docs` function with the task's metadata, which `--metadata` and `task_manager` add to. Imports `datasets` when called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tasks.problem_sets import answers, minicode
from tasks.problem_sets.published import LOADERS
from tasks.stage import UserError

if TYPE_CHECKING:
    from datasets import Dataset


def human_eval_docs(**metadata: Any) -> dict[str, Dataset]:
    return _published("human_eval", metadata)


def mbpp_docs(**metadata: Any) -> dict[str, Dataset]:
    return _published("mbpp", metadata)


def gsm8k_docs(**metadata: Any) -> dict[str, Dataset]:
    return _published("gsm8k", metadata)


def math500_docs(**metadata: Any) -> dict[str, Dataset]:
    return _published("math500", metadata)


def minicode_docs(*, split: str, count: int, seed: int, long: bool, **metadata: Any) -> dict[str, Dataset]:
    return _as_test_split(minicode.generate(split=split, count=count, seed=seed, long=long))


def number_results(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """GSM8K: 1 where the answer is the reference number."""
    return {"exact_match": float(answers.same_number(doc["answer"], answers.extract_number(results[0])))}


def math_results(doc: Mapping[str, Any], results: list[str]) -> dict[str, float]:
    """MATH: 1 where the answer means what the reference means."""
    return {"math_verify": float(answers.same_math(doc["answer"], answers.extract_math(results[0])))}


def code_results(doc: Mapping[str, Any], results: list[Mapping[str, Any]]) -> dict[str, float]:
    """Code: 1 where the sandbox has passed the program (see code_task.py)."""
    return {"pass@1": float(results[0]["passed"])}


def _published(name: str, metadata: Mapping[str, Any]) -> dict[str, Dataset]:
    files = metadata.get("data_files") or {}
    if not isinstance(files, Mapping) or not set(files) <= set(LOADERS):
        raise UserError(f'data_files={files}: give a path or hub id by data set ({", ".join(LOADERS)}), as in data_files={{"{name}": "FILE"}}')
    return _as_test_split(LOADERS[name](files.get(name)))


def _as_test_split(problems: Iterable[Any]) -> dict[str, Dataset]:
    from datasets import Dataset

    return {"test": Dataset.from_list([asdict(problem) for problem in problems])}
