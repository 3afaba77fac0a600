"""From answers to verdicts, by what a prompt brings: tests to run in the sandbox, a reference answer to compare with, or nothing.

Reads texts only, so that answers on disk can be judged again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.artifacts import Prompt
from tasks.problem_sets.problem import Problem
from tasks.problem_sets.sandbox import SandboxConfig

NUMBERS = ("gsm8k",)  # problem sets whose answers are numbers; the others' are LaTeX


def runs_code(prompts: Sequence[Prompt]) -> bool:
    return all(p.meta.get("tests") for p in prompts)


def judge(prompts: Sequence[Prompt], texts: Sequence[str], sandbox: SandboxConfig) -> list[dict[str, Any]] | None:
    """{"passed", "reason"} of each text; None where not every prompt tells right from wrong. Raises UserError as the sandbox does."""
    if runs_code(prompts):
        from tasks.problem_sets.scoring import score

        fields = Problem.__dataclass_fields__
        problems = [Problem(**{k: v for k, v in p.meta.items() if k in fields}) for p in prompts]
        return [{"passed": v.passed, "reason": v.reason} for v in score(problems, texts, sandbox)]
    if all(p.meta.get("answer") for p in prompts):
        return [_compared(p, text) for p, text in zip(prompts, texts, strict=True)]
    return None


def _compared(prompt: Prompt, text: str) -> dict[str, Any]:
    from tasks.problem_sets.answers import extract_math, extract_number, same_math, same_number

    extract, same = (extract_number, same_number) if prompt.meta["problem_set"] in NUMBERS else (extract_math, same_math)
    answer = extract(text)
    passed = same(prompt.meta["answer"], answer)
    return {"passed": passed, "reason": "passed" if passed else "no_answer" if answer is None else "wrong"}
