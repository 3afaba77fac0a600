"""From answers to verdicts, by what a prompt brings: tests to run in the sandbox, a reference answer to compare with, or nothing.

Reads texts only, so that answers on disk can be judged again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from tasks.artifacts import Prompt
from tasks.problem_sets.problem import Problem
from tasks.problem_sets.sandbox import SandboxConfig

NUMBERS = ("gsm8k",)  # problem sets whose answers are numbers; the others' are LaTeX


class Verdict(TypedDict):
    passed: bool
    reason: str


def judged_by(prompt: Prompt) -> Literal["tests", "answer"] | None:
    """What tells a right answer to this prompt from a wrong one; None where nothing does."""
    return "tests" if prompt.meta.get("tests") else "answer" if prompt.meta.get("answer") else None


def problem_of(prompt: Prompt) -> Problem:
    """What a prompt that is judged by tests was made from."""
    return Problem(**{name: value for name, value in prompt.meta.items() if name in Problem.__dataclass_fields__})


def judge(prompts: Sequence[Prompt], texts: Sequence[str], sandbox: SandboxConfig) -> list[Verdict]:
    """The verdict on each text; every prompt must tell right from wrong. Raises UserError as the sandbox does."""
    found: dict[int, Verdict] = {}
    coded = [i for i, p in enumerate(prompts) if judged_by(p) == "tests"]
    if coded:
        from tasks.problem_sets.scoring import score

        results = score([problem_of(prompts[i]) for i in coded], [texts[i] for i in coded], sandbox)
        found |= {i: {"passed": r.passed, "reason": r.reason} for i, r in zip(coded, results, strict=True)}
    return [found[i] if i in found else _compared(p, text) for i, (p, text) in enumerate(zip(prompts, texts, strict=True))]


def _compared(prompt: Prompt, text: str) -> Verdict:
    from tasks.problem_sets.answers import extract_math, extract_number, same_math, same_number

    extract, same = (extract_number, same_number) if prompt.meta["problem_set"] in NUMBERS else (extract_math, same_math)
    answer = extract(text)
    passed = same(prompt.meta["answer"], answer)
    return {"passed": passed, "reason": "passed" if passed else "no_answer" if answer is None else "wrong"}
