"""What a problem of a code benchmark is, whichever set it comes from; running its tests is the sandbox's job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One task: the text a user would send, and what decides whether the answer is right."""

    problem_id: str  # unique within its set, e.g. "HumanEval/12"
    prompt: str  # the user's message, before any chat template
    entry_point: str  # the function that `tests` call
    tests: str  # Python source of asserts, executed after the completion's code
    solution: str | None  # reference code, where the set has one
    preamble: str = ""  # source put before the completion's code: imports, helpers and the signature that the prompt shows
