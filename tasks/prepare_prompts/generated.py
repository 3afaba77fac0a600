"""Benchmark problems as prompts: minicode, generated here with its splits, and published sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from tasks.prepare_prompts.config import Draft, PreparePromptsConfig, Source
from tasks.stage import UserError

if TYPE_CHECKING:
    from tasks.problem_sets.problem import Problem, Question


def minicode_drafts(config: PreparePromptsConfig) -> Iterator[Draft]:
    from tasks.problem_sets import minicode

    long = config.source is Source.minicode_long
    for split, count in (("train", config.train), ("validation", config.validation), ("test", config.test)):
        if count:
            try:
                problems = minicode.generate(split=split, count=count, seed=config.seed, long=long)
            except ValueError as error:
                raise UserError(f"{config.section}.{split}: {error}") from error
            yield from (_draft(problem, config.source.value, split) for problem in problems)


def published_drafts(config: PreparePromptsConfig) -> Iterator[Draft]:
    from tasks.problem_sets.published import LOADERS

    name = config.source.value
    for problem in LOADERS[name](config.path, revision=config.revision, setting=f"{config.section}.path"):
        yield _draft(problem, name)


def _draft(problem: Problem | Question, problem_set: str, split: str = "") -> Draft:
    return Draft([{"role": "user", "content": problem.prompt}], {"problem_set": problem_set, **asdict(problem)}, split)
