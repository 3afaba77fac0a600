"""The configuration of a pipeline: structured, so that Hydra refuses unknown keys, and checked as a whole before anything runs.

Defaults live in the stages' own dataclasses; this file only puts them together. What sections must agree on is in checks.py.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass, field
from enum import Enum

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from jacobi_core.distillation.noise_schedule import NoiseSchedule, ScheduleShape, check_kind
from pipelines.config.checks import mistakes
from pipelines.config.sections import Sections
from pipelines.estimate.forecast import EstimateConfig
from pipelines.fit import FitConfig, concerns
from pipelines.tracking.settings import TrackingConfig
from tasks.base_model.stage import BaseModelConfig
from tasks.distill.config import DistillConfig
from tasks.evaluate.benchmarks import EvaluationConfig
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig, TrajectorySettings
from tasks.measure_latency import MeasureLatencyConfig
from tasks.pack_sequences import PackSettings
from tasks.prepare_prompts.config import PromptSettings
from tasks.search_decoding.config import SearchDecodingConfig
from tasks.stage import ClusterConfig, UserError

log = logging.getLogger(__name__)


class Baseline(str, Enum):
    """Branches trained beside the rounds, on round 1's trajectories and as many packed tokens as all rounds together."""

    cllm = "cllm"  # window 1, random schedule: every noisy block conditions on clean text only


@dataclass
class PathsConfig:
    """Where things are written. Relative paths start at the working directory."""

    outputs: str = "outputs"  # run folders
    store: str = "outputs/store"  # finished stages, shared by all runs: a folder (NFS too), or a URI such as s3://bucket/folder
    work: str | None = None  # folder that stages work in where the store is a URI of object storage; none: `work` in `outputs`
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
    evaluate: EvaluationConfig = field(default_factory=EvaluationConfig)
    tune: bool = False  # measure this machine's latencies, and search the last model's fastest decoding setting
    latency: MeasureLatencyConfig = field(default_factory=MeasureLatencyConfig)
    search: SearchDecodingConfig = field(default_factory=SearchDecodingConfig)
    fit: FitConfig = field(default_factory=FitConfig)  # of rounds, caps and budget to the model's own answers
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    estimate: EstimateConfig = field(default_factory=EstimateConfig)  # what the dry run's figures rest on where nothing is measured
    paths: PathsConfig = field(default_factory=PathsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    fail_fast: bool = False  # of a sweep: no job is started once one has failed
    keep_going: bool = False  # after a failure, run all that does not need the failed stage; else the run ends at once
    dry_run: bool = False  # print the stage table and stop
    until: str | None = None  # last stage to run, with all it needs
    force: list[str] = field(default_factory=list)  # stages to recompute


def register() -> None:
    """Makes the schema known to Hydra as `pipeline_schema`."""
    ConfigStore.instance().store(name="pipeline_schema", node=PipelineConfig)


def build(composed: DictConfig) -> PipelineConfig:
    """The composed config as dataclasses, checked. Raises UserError with every mistake on a line of its own, each naming its field."""
    plain = OmegaConf.create(OmegaConf.to_container(composed, resolve=False))
    sections = Sections(OmegaConf.merge(OmegaConf.structured(PipelineConfig), plain))
    config = PipelineConfig(**{f.name: sections.read(f.name) for f in dataclasses.fields(PipelineConfig)})
    config.cluster.address = cluster_address(config.cluster.address)
    told = [message for message in mistakes(config) if not sections.unsure(message) and not (config.fit.enabled and concerns(message))]
    if found := list(dict.fromkeys([*sections.mistakes, *told])):
        raise UserError("\n".join(found))
    return config


def check_fitted(config: PipelineConfig) -> None:
    """What `build` leaves to be told once `fit` has filled in what is open. Raises UserError with every mistake on a line of its own."""
    if found := list(dict.fromkeys(mistakes(config))):
        raise UserError("\n".join(found))


def cluster_address(configured: str | None) -> str | None:
    """Of the cluster to join, None for a local one. What the config leaves open, RAY_ADDRESS decides, as it does for all of Ray's own tools."""
    address = configured or os.environ.get("RAY_ADDRESS") or None
    if address and not configured:
        log.info("cluster.address is not set: joining the Ray cluster of RAY_ADDRESS=%s", address)
    return None if address == "local" else address
