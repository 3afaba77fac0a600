"""The whole method on one page: config -> stage graph. Wiring only; what a stage does is in tasks/."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from pipelines.config.own_schedule import schedule_identity
from pipelines.config.schema import Baseline, PipelineConfig, RoundConfig
from pipelines.graph.dag import Graph, Stage
from pipelines.graph.room import Needs
from tasks.base_model.model_source import hash_files
from tasks.base_model.stage import BaseModelConfig
from tasks.carry_decoding import CarryDecodingConfig
from tasks.distill.config import DistillConfig, Length, MatchedDistillConfig
from tasks.evaluate.config import AnswersConfig, EvaluateConfig, SpeedConfig
from tasks.excerpts import INPUT as STAGE_INPUT
from tasks.excerpts import ExcerptsConfig
from tasks.export_model import ExportConfig
from tasks.generate_trajectories.config import Collect, GenerateTrajectoriesConfig
from tasks.measure_latency import machine_identity
from tasks.pack_sequences import PackConfig
from tasks.prepare_prompts.config import GENERATED, PreparePromptsConfig, PromptSettings, Source
from tasks.problem_sets.human_eval import packaged_file
from tasks.problem_sets.published import VERSIONS
from tasks.report import ReportConfig
from tasks.row_files import data_files, hub_commit, is_hub_id
from tasks.stage import ClusterConfig


def build_graph(config: PipelineConfig, *, identity_cache: Path) -> Graph:
    """All stages of a run. Reads external inputs (model, prompt file) to identify them: raises UserError where they are missing."""
    stages = list(_stages(config, identity_cache))
    stages += _report(config, stages)
    return Graph(dataclasses.replace(stage, needs=_needs(stage, config.cluster)) for stage in stages)


def _needs(stage: Stage, cluster: ClusterConfig) -> Needs:
    """What `room` describes, by the stage's kind."""
    settings = stage.config
    if stage.kind == "distill":
        return Needs.workers(dataclasses.replace(cluster, workers=cluster.ranks))
    if stage.kind == "trajectories" or (stage.kind == "answers" and settings.distributed):
        return Needs.workers(cluster)
    if stage.kind in ("speed", "latency", "search"):
        return Needs.timed()
    if stage.kind == "answer_lengths":
        return Needs.computing(cluster, here=True)
    if stage.kind in ("base", "answers"):
        return Needs.computing(cluster, here=stage.kind == "base" and settings.path is not None)
    if stage.kind == "evaluate":
        return Needs(cpus=settings.sandbox.workers)
    return Needs(here=stage.kind == "prompts")


def _stages(config: PipelineConfig, identity_cache: Path) -> Iterator[Stage]:
    model = _model_identity(config, identity_cache)
    yield _prompts(config, identity_cache, model)
    yield from _benchmark_prompts(config, identity_cache)
    base = BaseModelConfig(**{k: v for k, v in _fields(config.model).items() if k != "trust_remote_code"})
    yield Stage("base", "base", 1, "tasks.base_model.stage:run", base, inputs={"prompts": "prompts"}, external={"model": model})
    if config.fit.enabled:
        measured = {"prompts": "prompts", "model": "base"}
        yield Stage("answer_lengths", "answer_lengths", 1, "tasks.measure_answers:run", config.fit.answers, inputs=measured)
    yield from _evaluate(config, "base", model="base")

    started_from = "base"
    for number, round_ in enumerate(config.rounds, start=1):
        name = f"round{number}"
        yield _trajectories(config, name, round_, model=started_from)
        yield _pack(config, name, round_, _schedule(config, round_), trajectories=f"{name}/trajectories")
        yield _distill(name, _round_distill(config, round_), model=started_from)
        yield _export(name, round_.block_size, model=started_from)
        yield from _evaluate(config, name, model=f"{name}/export")
        started_from = f"{name}/export"

    rounds = [f"round{i + 1}" for i in range(len(config.rounds))]
    if Baseline.cllm in config.baselines:
        first = config.rounds[0]
        yield _pack(config, "cllm", first, dataclasses.replace(_schedule(config, first), kind="cllm"), trajectories="round1/trajectories")
        budget = {f"budget/{name}": f"{name}/pack" for name in rounds}  # not their distillations: it trains beside the last of them
        yield _distill("cllm", _matched_distill(config, rounds), model="base", more_inputs=budget)
        yield _export("cllm", first.block_size, model="base")
        yield from _evaluate(config, "cllm", model="cllm/export")

    if config.tune:
        yield from _tune(config, final=f"{rounds[-1]}/export", cache=identity_cache)


def _report(config: PipelineConfig, stages: Sequence[Stage]) -> Iterator[Stage]:
    """What a run ends in. Nothing depends on it, so that a changed report costs seconds.

    `excerpts` reads all other stages for the report, so that what a finished run still needs (`store.uses`) is small.
    """
    ids = [stage.id for stage in stages]
    yield Stage("excerpts", "excerpts", 1, "tasks.excerpts:run", ExcerptsConfig(), inputs={f"{STAGE_INPUT}{stage}": stage for stage in ids})
    trained = [*(f"round{i + 1}" for i in range(len(config.rounds))), *(b.value for b in config.baselines)]
    evaluated = ["", *(f"/{benchmark.name.value}" for benchmark in config.evaluate.benchmarks)]
    inputs = {f"evaluate/{name}{what}": f"{name}{what}/evaluate" for name in ["base", *trained] for what in evaluated}
    inputs |= {f"distill/{name}": f"{name}/distill" for name in trained}
    inputs |= {name: name for name in ("latency", "search") if name in ids}
    final = "final" if "final" in ids else f"round{len(config.rounds)}/export"
    inputs |= {"excerpts": "excerpts", "export/final": final}
    yield Stage("report", "report", 4, "tasks.report:run", ReportConfig(config.name), inputs=inputs)


def _trajectories(config: PipelineConfig, name: str, round_: RoundConfig, *, model: str) -> Stage:
    schedule = _schedule(config, round_) if config.trajectories.collect is Collect.schedule else None
    settings = GenerateTrajectoriesConfig(**_fields(config.trajectories), block_size=round_.block_size, schedule=schedule)
    settings = dataclasses.replace(settings, **_given(prompts=round_.prompts))
    return Stage(
        f"{name}/trajectories",
        "trajectories",
        2,
        "tasks.generate_trajectories.stage:run",
        settings,
        inputs={"prompts": "prompts", "model": model},
        external=schedule_identity(schedule, round_.block_size) if schedule else {},
        resumable=True,
    )


def _pack(config: PipelineConfig, name: str, round_: RoundConfig, schedule: NoiseSchedule, *, trajectories: str) -> Stage:
    settings, external = PackConfig(**_fields(config.pack), schedule=schedule), schedule_identity(schedule, round_.block_size)
    return Stage(f"{name}/pack", "pack", 2, "tasks.pack_sequences:run", settings, inputs={"trajectories": trajectories}, external=external)


def _distill(name: str, settings: DistillConfig, *, model: str, more_inputs: dict[str, str] | None = None) -> Stage:
    inputs = {"packed": f"{name}/pack", "model": model, "prompts": "prompts", **(more_inputs or {})}
    return Stage(f"{name}/distill", "distill", 2, "tasks.distill.stage:run", settings, inputs=inputs, resumable=True)


def _export(name: str, block_size: int, *, model: str) -> Stage:
    settings = ExportConfig(name=name, block_size=block_size)
    inputs = {"model": model, "distill": f"{name}/distill", "packed": f"{name}/pack", "prompts": "prompts"}
    return Stage(f"{name}/export", "export", 3, "tasks.export_model:run", settings, inputs=inputs)


def _evaluate(config: PipelineConfig, name: str, *, model: str) -> Iterator[Stage]:
    """On the prompts of `data`, and on every benchmark beside them."""
    shared = config.evaluate.shared()
    yield from _evaluate_on(name, shared, prompts="prompts", model=model)
    for benchmark in config.evaluate.benchmarks:
        what = benchmark.name.value
        yield from _evaluate_on(f"{name}/{what}", benchmark.evaluation(shared), prompts=f"{what}/prompts", model=model)


def _evaluate_on(name: str, settings: EvaluateConfig, *, prompts: str, model: str) -> Iterator[Stage]:
    """Answered once, wherever; timed on this machine; judged and tabulated in seconds, by a stage of its own."""
    inputs = {"prompts": prompts, "model": model}
    answers, speed = (kind(**_fields(settings, of=kind)) for kind in (AnswersConfig, SpeedConfig))
    yield Stage(f"{name}/answers", "answers", 1, "tasks.evaluate.stage:decode_answers", answers, inputs=inputs, resumable=True)
    machine = {"machine": machine_identity()}
    yield Stage(f"{name}/speed", "speed", 1, "tasks.evaluate.stage:time_decoders", speed, inputs=inputs, external=machine, resumable=True)
    inputs = {**inputs, "answers": f"{name}/answers", "speed": f"{name}/speed"}
    yield Stage(f"{name}/evaluate", "evaluate", 4, "tasks.evaluate.stage:score", settings, inputs=inputs)


def _tune(config: PipelineConfig, *, final: str, cache: Path) -> Iterator[Stage]:
    """What this machine makes of the last model: figures of another machine are no answer, so the machine is part of what is asked."""
    machine = {"machine": machine_identity()}
    latency = dataclasses.replace(config.latency, cache=str(cache / "latency"))
    yield Stage("latency", "latency", 1, "tasks.measure_latency:run", latency, inputs={"model": "base"}, external=machine)
    inputs = {"prompts": "prompts", "model": final}
    yield Stage("search", "search", 1, "tasks.search_decoding:run", config.search, inputs=inputs, external=machine)
    yield Stage("final", "final", 1, "tasks.carry_decoding:run", CarryDecodingConfig(), inputs={"model": final, "search": "search"})


def _schedule(config: PipelineConfig, round_: RoundConfig) -> NoiseSchedule:
    schedule = NoiseSchedule(**_fields(config.schedule), kind=round_.noise_schedule or config.noise_schedule, window=round_.window)
    return dataclasses.replace(schedule, **_given(t_min=round_.t_min, t_max=round_.t_max))


def _round_distill(config: PipelineConfig, round_: RoundConfig) -> DistillConfig:
    given = _given(learning_rate=round_.learning_rate, epochs=round_.epochs, max_steps=round_.max_steps)
    return dataclasses.replace(config.distill, **given)


def _matched_distill(config: PipelineConfig, rounds: Sequence[str]) -> MatchedDistillConfig:
    """Round 1's settings, for as many packed tokens as all rounds."""
    each = [_round_distill(config, round_) for round_ in config.rounds]
    matched = {name: Length(**_fields(distill, of=Length)) for name, distill in zip(rounds, each, strict=True)}
    return MatchedDistillConfig(**{**_fields(each[0]), "max_steps": None}, matched=matched)


def _fields(settings: Any, *, of: type | None = None) -> dict[str, Any]:
    """of: only those that this dataclass has too."""
    return {f.name: getattr(settings, f.name) for f in dataclasses.fields(of or settings)}


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _model_identity(config: PipelineConfig, cache: Path) -> dict[str, Any]:
    if config.model.path is None:
        return asdict(config.model.pretrain)
    from tasks.base_model.model_source import model_identity

    return model_identity(config.model.path, cache_dir=cache)


def _prompts(config: PipelineConfig, cache: Path, model: dict[str, Any]) -> Stage:
    data, settings = _data_identity(config.data, cache), _fields(config.data)
    if "commit" in data:
        settings["revision"] = data["commit"]  # what is read is what was identified, even if the branch moves meanwhile
    prompts = PreparePromptsConfig(**settings, tokenizer=config.model.path)
    return Stage("prompts", "prompts", 2, "tasks.prepare_prompts:run", prompts, external={"data": data, "tokenizer": model})


def _benchmark_prompts(config: PipelineConfig, cache: Path) -> Iterator[Stage]:
    """With the tokenizer of `prompts`, which is the model's."""
    shared = config.evaluate.shared()
    for number, benchmark in enumerate(config.evaluate.benchmarks):
        section, name = f"evaluate.benchmarks.{number}", benchmark.name.value
        settings = benchmark.prompts(shared, system=config.data.system, section=section)
        data = _data_identity(settings, cache, section=section)
        if "commit" in data:
            settings = dataclasses.replace(settings, revision=data["commit"])
        external = {"data": data, "benchmark_version": VERSIONS[name]}
        yield Stage(f"{name}/prompts", "prompts", 2, "tasks.prepare_prompts:run", settings, inputs={"prompts": "prompts"}, external=external)


def _data_identity(data: PromptSettings, cache: Path, *, section: str = "data") -> dict[str, Any]:
    """Content of what the prompts are read from; generated problems are named by their settings."""
    if data.source in GENERATED or (data.path is None and data.source is not Source.human_eval):
        return {}  # a path that is missing is the stage's own check
    if data.path and is_hub_id(data.path):
        return {"hub": data.path, "commit": hub_commit(data.path, data.revision)}
    files = data_files(data.path or packaged_file(), setting=f"{section}.path")
    hashes = hash_files(files, cache)
    return {"sha256": hashes[0]} if len(hashes) == 1 else {"files": sorted(hashes)}
