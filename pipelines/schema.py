"""The configuration of a pipeline: structured, so that Hydra refuses unknown keys, and checked as a whole before anything runs.

Defaults live in the stages' own dataclasses; this file only puts them together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jacobi_core.distillation.noise_schedule import NoiseSchedule, ScheduleError, ScheduleShape, check_kind
from tasks.base_model.stage import BaseModelConfig
from tasks.cluster import check_workers
from tasks.distill.config import DistillConfig
from tasks.distill.data import check_divides
from tasks.evaluate.config import EvaluateConfig
from tasks.generate_trajectories.config import Collect, GenerateTrajectoriesConfig, TrajectorySettings
from tasks.measure_latency import MeasureLatencyConfig
from tasks.pack_sequences import PackSettings
from tasks.prepare_prompts import SPLITS, PromptSettings
from tasks.search_decoding.config import SearchDecodingConfig
from tasks.stage import ClusterConfig, UserError


class Baseline(str, Enum):
    """Branches trained beside the rounds, on round 1's trajectories and as many packed tokens as all rounds together."""

    cllm = "cllm"  # window 1, random schedule: every noisy block conditions on clean text only


@dataclass
class PathsConfig:
    """Where things are written. Relative paths start at the working directory."""

    outputs: str = "outputs"  # run folders
    store: str = "outputs/store"  # finished stages, shared by all runs
    tracking_uri: str | None = None  # of MLflow; none: a sqlite database in `outputs`
    results: str | None = None  # where a copy of results.json goes


@dataclass
class RoundConfig:
    """One round of progressive distillation. What is left empty is taken from the groups that all rounds share."""

    block_size: int = GenerateTrajectoriesConfig.block_size  # n of its trajectories
    window: int = NoiseSchedule.window  # w, in blocks
    noise_schedule: str | None = None
    t_min: float | None = None
    t_max: float | None = None
    learning_rate: float | None = None
    epochs: float | None = None
    max_steps: int | None = None
    prompts: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "window", "learning_rate", "epochs", "max_steps", "prompts"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if self.noise_schedule is not None:
            check_kind(self.noise_schedule)


@dataclass
class ModelConfig(BaseModelConfig):
    trust_remote_code: bool = False  # may the checkpoint bring its own Python code?


@dataclass
class PipelineConfig:
    """Everything `python -m pipelines.full_run` takes."""

    name: str = "unnamed"  # in results.json and as MLflow's run name
    seed: int = 0  # of everything drawn at random; single seeds can be set beside what they seed
    data: PromptSettings = field(default_factory=PromptSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    noise_schedule: str = NoiseSchedule.kind  # one of KINDS, or your own function as package.module:function
    schedule: ScheduleShape = field(default_factory=ScheduleShape)
    rounds: list[RoundConfig] = field(default_factory=lambda: [RoundConfig(block_size=16, window=16), RoundConfig(block_size=32, window=8)])
    baselines: list[Baseline] = field(default_factory=lambda: [Baseline.cllm])
    trajectories: TrajectorySettings = field(default_factory=TrajectorySettings)
    pack: PackSettings = field(default_factory=PackSettings)
    distill: DistillConfig = field(default_factory=DistillConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    tune: bool = False  # measure this machine's latencies, and search the last model's fastest decoding setting
    latency: MeasureLatencyConfig = field(default_factory=MeasureLatencyConfig)
    search: SearchDecodingConfig = field(default_factory=SearchDecodingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    dry_run: bool = False  # print the stage table and stop
    until: str | None = None  # last stage to run, with all it needs
    force: list[str] = field(default_factory=list)  # stages to recompute


def register() -> None:
    """Makes the schema known to Hydra as `pipeline_schema`."""
    ConfigStore.instance().store(name="pipeline_schema", node=PipelineConfig)


def build(composed: DictConfig) -> PipelineConfig:
    """The composed config as dataclasses, checked. Raises UserError naming the field."""
    plain = OmegaConf.create(OmegaConf.to_container(composed, resolve=False))
    typed = OmegaConf.merge(OmegaConf.structured(PipelineConfig), plain)
    config = PipelineConfig(**{f.name: _objects(typed[f.name], f.name) for f in dataclasses.fields(PipelineConfig)})
    check(config)
    return config


def _objects(node: Any, path: str) -> Any:
    """`node` as dataclasses. What it holds comes first, so that an error can say where it is."""
    if not OmegaConf.is_config(node):
        return node
    for key in range(len(node)) if OmegaConf.is_list(node) else node:
        _objects(node[key], f"{path}.{key}")
    try:
        return OmegaConf.to_object(node)
    except OmegaConfBaseException:
        raise
    except ValueError as error:  # its message begins with the field
        raise UserError(f"{path}.{str(error).removeprefix(path.rpartition('.')[2] + '.')}") from error


def check(config: PipelineConfig) -> None:
    """What no single section can know."""
    if not config.rounds:
        raise UserError("rounds: at least one round is needed")
    try:
        check_kind(config.noise_schedule)
    except ScheduleError as error:
        raise UserError(str(error)) from error
    try:
        one_schedule = config.trajectories.collect is Collect.schedule
        GenerateTrajectoriesConfig(**vars(config.trajectories), schedule=NoiseSchedule() if one_schedule else None)
    except ValueError as error:
        raise UserError(f"trajectories.{error}") from error
    if one_schedule and Baseline.cllm in config.baselines:
        raise UserError(
            "trajectories.collect=schedule keeps no states for another schedule, and baselines=[cllm] has one of its own; use collect=all"
        )
    splits = {"evaluate.split": config.evaluate.split}
    if config.tune:
        splits |= {"search.split": config.search.split, "search.heldout_split": config.search.heldout_split}
    for setting, split in splits.items():
        if split not in SPLITS:
            raise UserError(f"{setting}={split}: there is no such split; choose one of {', '.join(SPLITS)}")
        if getattr(config.data, split) == 0:
            what = "evaluate" if setting == "evaluate.split" else "measure"
            raise UserError(f"data.{split}=0 leaves nothing to {what} on; raise it or choose another {setting}")
    check_workers(config.cluster)
    check_divides(config.distill, config.cluster.workers)
    if config.data.source.value in ("minicode", "minicode_long", "human_eval", "mbpp") and not config.evaluate.sandbox.allow_code_execution:
        raise UserError(
            f"evaluate.sandbox.allow_code_execution is false, and data.source={config.data.source.value} is scored by running generated code; "
            "set it to true to run it in the sandbox"
        )
    if config.model.path is None and config.data.source.value not in ("minicode", "minicode_long"):
        raise UserError("model.path is missing: only data.source=minicode can pretrain its own base; name a folder, hub id or GGUF file")
