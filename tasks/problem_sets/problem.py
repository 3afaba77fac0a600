"""What a problem of a benchmark is, whichever set it comes from: code (judged by running tests) or mathematics (by comparing answers)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One task of a code benchmark: the text a user would send, and what decides whether the answer is right."""

    problem_id: str  # unique within its set, e.g. "HumanEval/12"
    prompt: str  # the user's message, before any chat template
    entry_point: str  # the function that `tests` call
    tests: str  # Python source of asserts, executed after the completion's code
    solution: str | None  # reference code, where the set has one
    preamble: str = ""  # source put before the completion's code: imports, helpers and the signature that the prompt shows


@dataclass(frozen=True)
class Question:
    """One task of a mathematics benchmark: its answer is compared with the reference, nothing is run."""

    problem_id: str  # unique within its set
    prompt: str  # the user's message, before any chat template
    question: str  # the bare question, for prompts that say how to answer elsewhere (a system message)
    answer: str  # the reference: a number (GSM8K) or LaTeX (MATH)
