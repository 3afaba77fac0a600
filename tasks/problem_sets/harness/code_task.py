"""lm-eval's task for generated code: all completions are run in our sandbox, several at once, before lm-eval looks at them one by one.

Imports lm-eval: only task files name it.
"""

from __future__ import annotations

from typing import Any

from lm_eval.api.task import ConfigurableTask

from tasks.problem_sets.problem import Problem
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.problem_sets.scoring import extract_code, score


class CodeTask(ConfigurableTask):
    """A task file's `class:`. Its documents are Problems; what a filter hands on is the verdict: passed, reason, detail and the code that ran.

    lm-eval refuses tasks with `unsafe_code: true` without --confirm_run_unsafe_code: that is the consent to run code. metadata.sandbox:
    settings of the sandbox (tasks/problem_sets/sandbox.py) beside the defaults.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={name: value for name, value in config.items() if name != "class"})
        self._sandbox = SandboxConfig(**{**(self.config.metadata or {}).get("sandbox", {}), "allow_code_execution": True})

    def apply_filters(self) -> None:
        super().apply_filters()
        if "bypass" in self._metric_fn_list:  # --predict_only: nobody asked for verdicts
            return
        for filtered in self._filters:
            texts = [instance.filtered_resps[filtered.name] for instance in self.instances]
            problems = [Problem(**instance.doc) for instance in self.instances]
            for instance, problem, text, verdict in zip(self.instances, problems, texts, score(problems, texts, self._sandbox), strict=True):
                code = extract_code(text, problem.entry_point)
                instance.filtered_resps[filtered.name] = {
                    "passed": verdict.passed,
                    "reason": verdict.reason,
                    "detail": verdict.detail,
                    "code": code,
                }
