"""What a run will cost, before anything runs: the stage table of `dry_run=true`, and what it asks for that is not there.

    facts      the model's config.json (no weights), finished stages of the store, latency curves measured on this machine
    declared   what nothing was measured of: a device's speed (estimate_hardware), mean lengths of prompts and answers (config `estimate`)

Imports neither torch nor ray. An existing cluster is asked only at the end, when the figures have been shown.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.estimate.hardware import HARDWARE, Hardware, hardware_for
from pipelines.estimate.model import ModelShape, find_shape, shape_of, shape_of_pretrained
from pipelines.estimate.stages import SIZES, Estimate, Estimator, Texts
from pipelines.fit import ASSUMED_ANSWER, assumed_prompt
from pipelines.graph.dag import PlannedStage
from tasks.measure_latency import machine_identity
from tasks.prepare_prompts.config import GENERATED, Source
from tasks.row_files import is_hub_id, open_rows
from tasks.stage import ClusterConfig, UserError

if TYPE_CHECKING:
    from pipelines.config.schema import PipelineConfig

UNKNOWN = "unknown (offline)"  # state of a stage whose input on the hub nobody here could identify


@dataclass
class EstimateConfig:
    """What is said of the machines and the data, for a run's figures only. Raises ValueError naming the field for a value that cannot be used."""

    hardware: str | None = None  # one of HARDWARE; none: the GPU that is here, H100 where GPUs are asked for and none is here, else cpu
    memory_gb: float | None = None  # this and the next five replace the figures of `hardware`
    tflops: float | None = None  # peak, dense
    bandwidth_gb: float | None = None  # per second
    layer_ms: float | None = None  # least time of a layer
    training_share: float | None = None  # of the peak
    decoding_share: float | None = None
    prompt_tokens: float | None = None  # mean; none: measured, else a quarter of data.max_prompt_tokens
    answer_tokens: float | None = None  # mean; none: measured, else half of trajectories.max_new_tokens
    taught_tpf: float = 3.0  # tokens per forward of a model that has been through a round
    model: ModelShape = field(default_factory=ModelShape)  # where model.path's config.json cannot be read here
    here: bool = True  # is the run meant for the cluster of this config? false: figures only, for machines that are elsewhere

    def __post_init__(self) -> None:
        if self.hardware is not None and self.hardware not in HARDWARE:
            raise ValueError(f"hardware must be one of {', '.join(HARDWARE)}, got {self.hardware}")
        for name in (*DEVICE_FIGURES, "prompt_tokens", "answer_tokens", "taught_tpf"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")


DEVICE_FIGURES = tuple(f.name for f in fields(Hardware) if f.name != "name")


@dataclass(frozen=True)
class Forecast:
    """The figures of a run, and what they rest on, one line each."""

    stages: Mapping[str, Estimate]  # by stage id
    states: Mapping[str, str]  # cached, to run, or UNKNOWN
    hardware: Hardware
    basis: tuple[str, ...]
    cluster: ClusterConfig

    @property
    def scratch_gb(self) -> float:
        """Of all trainings that may run at the same time: rounds follow each other, a baseline trains beside one of them."""
        training = {name: e.scratch_gb for name, e in self.stages.items() if self.states[name] != "cached"}
        if self.cluster.parallel_stages == 1:
            return max(training.values(), default=0.0)
        rounds = [gb for name, gb in training.items() if name.startswith("round")]
        return max(rounds, default=0.0) + sum(gb for name, gb in training.items() if not name.startswith("round"))


def forecast(config: PipelineConfig, planned: Sequence[PlannedStage], *, root: Path, manifests: Mapping[str, Any]) -> Forecast:
    """root: of the store, or of what of it is on this machine. manifests: of finished stages, by stage id."""
    asked, gpus = config.estimate, config.cluster.gpus_per_worker > 0
    seen = machine_identity()["gpus"]
    device = hardware_for(asked.hardware, seen=seen, gpus=gpus, **{name: getattr(asked, name) for name in DEVICE_FIGURES})
    shape, shape_from = _shape(config)
    records = list(_records(root))
    texts, texts_from = _texts(config, planned, manifests)
    rates = _rates(records, root, shape, gpus=gpus)
    latency = _latency(root, shape)
    estimator = Estimator(
        shape=shape,
        hardware=device,
        texts=texts,
        cluster=config.cluster,
        model_dtype=config.model.dtype,
        longest_prompt=config.data.max_prompt_tokens,
        train_prompts=train_prompts(config),
        test_prompts=getattr(config.data, config.evaluate.split) or 0,
        rates=rates,
        latency=latency,
    )
    states = stage_states(planned)
    for p in planned:
        metrics = manifests[p.stage.id].metrics if states[p.stage.id] == "cached" else None
        estimator.of(p.stage, finished=metrics)
    basis = [shape_from, _declared(device), texts_from]
    if rates or latency:
        basis.append("measured: seconds per token of earlier runs in this store and latency curves of this machine, for stages marked measured")
    return Forecast(estimator.found, states, device, tuple(basis), config.cluster)


def _declared(device: Hardware) -> str:
    return (
        f"{device.name}, declared: {device.tflops:g} TFLOPS, {100 * device.training_share:g} % of it in training and "
        f"{100 * device.decoding_share:g} % in wide forwards, {device.bandwidth_gb:g} GB/s, {device.layer_ms:g} ms per layer at least "
        "(estimate.hardware)"
    )


def stage_states(planned: Sequence[PlannedStage]) -> dict[str, str]:
    """By stage id. What rests on an input that could not be identified may be in the store or not: nobody can tell."""
    states: dict[str, str] = {}
    for p in planned:
        unknown = any(isinstance(e, Mapping) and "hub" in e and e.get("commit") is None for e in p.stage.external.values())
        if unknown or any(states[source] == UNKNOWN for source in p.stage.inputs.values()):
            states[p.stage.id] = UNKNOWN
        else:
            states[p.stage.id] = "cached" if p.cached else "to run"
    return states


def shortfalls(forecast: Forecast, *, root: Path) -> Iterator[str]:
    """What the run asks for that is not there, as errors. Asks this machine, or the existing cluster; starts no local Ray."""
    to_run = {name: e for name, e in forecast.stages.items() if forecast.states[name] != "cached"}
    cluster, device = forecast.cluster, forecast.hardware
    needed = max((e.gpus for e in to_run.values()), default=0)
    if cluster.address is None:
        has = gpus_here()
        if needed > has:
            yield (
                f"cluster.workers={cluster.workers} needs {needed:g} GPUs, this machine has {has}: lower cluster.workers, name a cluster "
                "(cluster.address), or set estimate.here=false to see the figures only"
            )
    elif to_run:
        from tasks.cluster import start_ray

        try:
            start_ray(cluster)
        except UserError as error:
            yield str(error)
        except Exception as error:  # nobody answers: each way of connecting raises its own kind
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield f"cluster.address={cluster.address}: no cluster answers ({reason}); start it, or set estimate.here=false to see the figures only"
    for name, e in to_run.items():
        if e.memory and e.gpus and device.memory_gb is not None and e.memory.total > device.memory_gb:
            yield (
                f"{name} needs about {e.memory.total:.0f} GB of a {device.name}'s {device.memory_gb:g}: more cluster.train_workers or "
                "distill.activation_checkpointing=true for training, a smaller batch_size for the others"
            )
    needs = sum(e.disk_gb or 0 for e in to_run.values()) + forecast.scratch_gb
    free = shutil.disk_usage(root).free / 1e9
    if needs > free:
        yield f"paths.store={root}: the run needs about {needs:,.0f} GB there, {free:,.0f} are free; make room or choose another paths.store"


def gpus_here() -> int:
    """GPUs that a local Ray would find."""
    machine = machine_identity()
    visible = machine["visible_gpus"]
    if visible is None:
        return len(machine["gpus"])
    return min(len(machine["gpus"]), len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


# ---- facts


def _shape(config: PipelineConfig) -> tuple[ModelShape | None, str]:
    path = config.model.path
    if path is None:
        shape: ModelShape | None = shape_of_pretrained(config.model.pretrain, config.data.tokenizer_vocabulary)
        source = "model.pretrain"
    else:
        shape, source = find_shape(path), "config.json"
        if shape is None and config.estimate.model.declared:
            shape, source = config.estimate.model, "declared: estimate.model"
    if shape is None:
        return None, f"model: the sizes of {path} are unknown here; declare them (estimate.model) for memory and hours"
    return shape, f"model: {shape.parameters / 1e9:.3g} billion parameters, {shape.layers} layers of width {shape.hidden} ({source})"


def _texts(config: PipelineConfig, planned: Sequence[PlannedStage], manifests: Mapping[str, Any]) -> tuple[Texts, str]:
    asked = config.estimate
    prompt, prompt_from = asked.prompt_tokens, "declared"
    answer, answer_from = asked.answer_tokens, "declared"
    for p in planned:  # what is finished knows better
        manifest = manifests.get(p.stage.id)
        metrics = manifest.metrics if manifest else {}
        if p.stage.id == "prompts" and "prompt_tokens_mean" in metrics:
            prompt, prompt_from = metrics["prompt_tokens_mean"], "measured"
        if p.stage.kind == "answer_lengths" and answer_from != "measured" and "answer_tokens_mean" in metrics:
            answer, answer_from = metrics["answer_tokens_mean"], "measured on a few"
        if p.stage.kind == "trajectories" and answer_from != "measured" and metrics.get("trajectories"):
            answer, answer_from = metrics["answer_tokens"] / metrics["trajectories"], "measured"
    if prompt is None:
        prompt, prompt_from = assumed_prompt(config), "a guess: a quarter of data.max_prompt_tokens"
    if answer is None and config.fit.enabled:
        answer, answer_from = ASSUMED_ANSWER, "assumed"
    if answer is None:
        answer, answer_from = config.trajectories.max_new_tokens / 2, "a guess: half of trajectories.max_new_tokens"
    said = f"texts: prompts of {prompt:.0f} tokens ({prompt_from}), answers of {answer:.0f} ({answer_from}), "
    said += f"{asked.taught_tpf:g} tokens per forward after a round (declared)"
    return Texts(prompt, answer, asked.taught_tpf), said


def train_prompts(config: PipelineConfig) -> float | None:
    """Training prompts that there will be at most; None where that cannot be known before they are read."""
    data = config.data
    if data.source in GENERATED or data.train is not None:
        return data.train
    if data.source in SIZES and not (data.path and is_hub_id(data.path)):
        return max(0, SIZES[data.source] - data.test - data.validation)
    if data.source is Source.file and data.path and not is_hub_id(data.path):
        there = sum(1 for file in open_rows(data.path, setting="data.path") for _ in file.read((file.fields or [])[:1]))
        return max(0, there - data.test - data.validation)
    return None


def _records(root: Path) -> Iterator[Mapping[str, Any]]:
    """Manifests of finished stages, oldest first."""
    found = []
    for path in root.glob("*/manifest.json"):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return iter(sorted((r for r in found if isinstance(r, dict) and "started" in r), key=lambda r: r["started"]))


def _rates(records: Sequence[Mapping[str, Any]], root: Path, shape: ModelShape | None, *, gpus: bool) -> dict[tuple[str, int | None], float]:
    """Seconds per token of the newest stage of each kind that ran on a model of these sizes, with GPUs or without as asked, on whatever cluster."""
    rates: dict[tuple[str, int | None], float] = {}
    folders = {r.get("fingerprint"): root / f"{r.get('kind')}-{r.get('fingerprint')}" for r in records}
    for r in records:
        tokens = r["metrics"].get({"trajectories": "answer_tokens", "distill": "train_tokens"}.get(r.get("kind"), ""))
        model = folders.get(r.get("upstream", {}).get("model"))
        if not tokens or model is None or shape is None or r.get("gpus", False) != gpus:
            continue
        try:
            its = shape_of(json.loads((model / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
        if its is not None and its.parameters == shape.parameters:
            rates[r["kind"], r["config"].get("block_size")] = r["seconds"] / tokens
    return rates


def _latency(root: Path, shape: ModelShape | None) -> dict[int, dict[int, float]]:
    """Seconds of a forward by batch size and tokens per text, at the shortest context, where this machine was measured for such a model."""
    machine, curves = machine_identity(), {}
    for path in sorted((root / "latency").glob("latency-*.json")):
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            same = all(kept["hardware"].get(name) == machine[name] for name in ("cpu", "gpus"))
            its = shape_of(kept["shape"])
            if same and shape is not None and its is not None and its.parameters == shape.parameters:
                for curve in sorted(kept["curves"], key=lambda c: -c["context"]):
                    curves[curve["batch_size"]] = dict(zip(curve["tokens"], curve["seconds"], strict=True))
        except (OSError, ValueError, KeyError):
            continue
    return curves
