"""OpenCodeInstruct (nvidia/OpenCodeInstruct, CC-BY-4.0): coding tasks with a model's answer, its tests' verdict and a judge's scores.

All nine columns are text. `average_test_score` is the share of the row's unit tests that the data set's own answer passes;
`llm_judgement` is JSON with three scores from 1 to 5. Only the task (`input`) becomes a prompt: the answers are our model's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tasks.prepare_prompts.config import Draft, OpenCodeInstructRule
from tasks.row_files import RowFile
from tasks.stage import UserError

READ = ("id", "input", "domain", "llm_judgement", "average_test_score")
JUDGED = ("requirement_conformance", "logical_correctness", "edge_case_consideration")
FIRST_ROWS = 100  # among these an unreadable row is a wrong schema and ends the run; later ones are dropped and counted


def open_code_instruct_drafts(rule: OpenCodeInstructRule, files: Iterator[RowFile], dropped: Counter[str]) -> Iterator[Draft]:
    """Rows that fulfil the rule. `dropped` gains one per other row, under the first rule that it breaks."""
    for file in files:
        file.require(*READ)
        for number, row in file.read(READ):
            try:
                score, judged = _scores(row)
            except ValueError as error:
                if number <= FIRST_ROWS:
                    raise UserError(f"{file.where}, row {number}: {error}; is this data in OpenCodeInstruct's schema?") from error
                dropped["unreadable"] += 1
                continue
            if broken := _broken(rule, score, judged):
                dropped[broken] += 1
                continue
            meta = {"problem_set": "open_code_instruct", "source_id": row["id"], "domain": row["domain"], "test_score": score}
            yield Draft([{"role": "user", "content": row["input"]}], meta)


def _broken(rule: OpenCodeInstructRule, score: float, judged: dict[str, float]) -> str | None:
    if rule.min_test_score is not None and score < rule.min_test_score:
        return "test_score"
    if rule.min_judge_score is not None:
        return next((name for name in JUDGED if judged[name] < rule.min_judge_score), None)
    return None


def _scores(row: Any) -> tuple[float, dict[str, float]]:
    """Test score and the judge's three. Raises ValueError naming the field where one is no number."""
    if not (isinstance(row, dict) and isinstance(row.get("input"), str) and row["input"]):
        raise ValueError("field 'input' holds no text")
    score = _number("average_test_score", row.get("average_test_score"))
    try:
        judgement = json.loads(row["llm_judgement"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"field 'llm_judgement' is no JSON ({error})") from error
    found = judgement if isinstance(judgement, dict) else {}
    # {"score": 5, "justification": ...} per dimension; derived sets hold the bare number
    scores = {name: value.get("score") if isinstance(value := found.get(name), dict) else value for name in JUDGED}
    return score, {name: _number(f"llm_judgement.{name}", value) for name, value in scores.items()}


def _number(name: str, value: Any) -> float:
    """Text is cast, never compared as text: "1", "1.0" and 1 are one score."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if number != number:
        raise ValueError(f"field {name!r} holds {value!r}, no number")
    return number
