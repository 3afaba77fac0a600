"""GSM8K, the 1,319 test questions of Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems" (MIT licence, (c) OpenAI).

Zero-shot with evalchemy's message, word for word; from a local copy of `test.jsonl` or from the hub. Answers are read by answers.py.
"""

from __future__ import annotations

from dataclasses import replace

from tasks.problem_sets.answers import extract_number
from tasks.problem_sets.benchmark_rows import benchmark_rows
from tasks.problem_sets.problem import Question
from tasks.row_files import HubPart
from tasks.stage import UserError

HUB_ID, PART = "openai/gsm8k", HubPart("main", "test")
ROWS = 1_319
MESSAGE = (
    "Solve the following grade-school math problem. Show your reasoning clearly and end your response with '#### <final answer>'.\n\n"
    "Question: {question}\nAnswer:"
)


def load(path: str | None = None, *, revision: str | None = None, setting: str = "data.path") -> list[Question]:
    """The questions of data with GSM8K's schema (a file, a folder, a hub id and its revision); None reads it from the hub.

    Raises UserError for missing data or a bad row, with its number.
    """
    questions, part = [], replace(PART, revision=revision)
    rows = benchmark_rows(path or HUB_ID, key="question", texts=("answer",), part=part, setting=setting, most=ROWS)
    for number, (row, where) in enumerate(rows):
        _, mark, number_text = row["answer"].rpartition("####")
        answer = extract_number(number_text) if mark else None
        if answer is None:
            raise UserError(f"{where}: the answer has no number after ####; repair the row")
        text = row["question"]
        questions.append(Question(problem_id=f"gsm8k/{number}", prompt=MESSAGE.format(question=text), question=text, answer=answer))
    return questions
