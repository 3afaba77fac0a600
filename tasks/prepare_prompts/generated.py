"""What is generated here, with its splits, and published benchmarks, as prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from tasks.prepare_prompts.config import Draft, PreparePromptsConfig, Source
from tasks.stage import UserError

if TYPE_CHECKING:
    from tasks.problem_sets.problem import Problem, Question


def generated_drafts(config: PreparePromptsConfig) -> Iterator[Draft]:
    """Raises UserError naming the split's setting where fewer exist than are asked for."""
    for split, count in (("train", config.train), ("validation", config.validation), ("test", config.test)):
        if count:
            try:
                yield from _generated(config, split, count)
            except ValueError as error:
                setting = config.section if config.only_test else f"{config.section}.{split}={count}"
                raise UserError(f"{setting}: {error}") from error


def _generated(config: PreparePromptsConfig, split: str, count: int) -> list[Draft]:
    name = config.source.value
    if config.source is Source.everyday:
        from tasks.problem_sets import everyday

        found = everyday.generate(split=split, count=count, seed=config.seed)
        return [Draft([{"role": "user", "content": one.prompt}], {"problem_set": name, "kind": one.kind}, split) for one in found]
    from tasks.problem_sets import minicode

    long = config.source is Source.minicode_long
    return [_draft(problem, name, split) for problem in minicode.generate(split=split, count=count, seed=config.seed, long=long)]


def published_drafts(config: PreparePromptsConfig) -> Iterator[Draft]:
    from tasks.problem_sets.published import LOADERS

    name = config.source.value
    for problem in LOADERS[name](config.path, revision=config.revision, setting=f"{config.section}.path"):
        yield _draft(problem, name)


def _draft(problem: Problem | Question, problem_set: str, split: str = "") -> Draft:
    return Draft([{"role": "user", "content": problem.prompt}], {"problem_set": problem_set, **asdict(problem)}, split)
