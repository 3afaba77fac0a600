"""What each stage will take: rows, tokens, devices, seconds, memory, disk. Pure functions of stage configs, a model's sizes and a few rates.

Every figure rests on the stages before it; one that is finished already says itself what it holds. docs/recipes.md works the paper's recipes
out by hand. What is left out: start-up, probes, checkpoints, waiting for data, the products of attention itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipelines.estimate.hardware import Hardware
from pipelines.estimate.memory import GB, TOGETHER, Memory, decoding_memory, training_memory
from pipelines.estimate.model import BYTES, ModelShape
from pipelines.graph.dag import Stage
from tasks.distill.config import DistillConfig, Length, MatchedDistillConfig
from tasks.evaluate.config import Reference
from tasks.prepare_prompts.config import PreparePromptsConfig, Source
from tasks.stage import ClusterConfig

FILL = 0.95  # of a packed row, where samples are short against it
PACKED_PER_SECOND = 100_000  # tokens, one CPU (measured: 118,000 on minicode)
PROMPTS_PER_SECOND = 2_000  # read, templated and written
PROMPT_BYTES, PACKED_BYTES, COMPLETION_BYTES = 8, 3, 8  # on disk, per token
WEIGHTS_GB_PER_SECOND = 1.0  # read or written
KEPT_CHECKPOINTS = 3  # of a training: two, and the one being written
LIGHT_SECONDS = 10.0  # of a stage that only reads and writes tables
SIZES = {Source.human_eval: 164, Source.mbpp: 500, Source.gsm8k: 1319, Source.math500: 500}  # problems of the published sets


@dataclass(frozen=True)
class Texts:
    """Mean tokens of a prompt and an answer, and tokens per forward of a model that has been through a round."""

    prompt: float
    answer: float
    taught_tpf: float


@dataclass(frozen=True)
class Estimate:
    """Of one stage. None: unknown. tokens: of answers, or of packed rows."""

    rows: float | None = None
    tokens: float | None = None
    gpus: float = 0
    seconds: float | None = 0.0
    memory: Memory | None = None
    disk_gb: float | None = 0.0
    scratch_gb: float = 0.0  # beside it, while it runs
    measured: bool = False  # are its seconds from earlier runs?


@dataclass
class Estimator:
    """Call `of` on the stages in their order."""

    shape: ModelShape | None
    hardware: Hardware
    texts: Texts
    cluster: ClusterConfig
    model_dtype: str
    longest_prompt: int
    train_prompts: float | None  # where it is known
    test_prompts: int
    rates: Mapping[tuple[str, int | None], float] = field(default_factory=dict)  # (kind, block size of trajectories) -> seconds per token, measured
    latency: Mapping[int, Mapping[int, float]] = field(default_factory=dict)  # batch size -> tokens per text -> seconds of a forward, measured
    found: dict[str, Estimate] = field(default_factory=dict)  # stage id -> estimate
    rooms: dict[str, int] = field(default_factory=dict)  # id of a pack stage -> tokens of its rows

    def of(self, stage: Stage, *, finished: Mapping[str, float] | None) -> Estimate:
        """finished: the metrics of its manifest, where it needs no run."""
        estimate = getattr(self, f"_{stage.kind}", self._light)(stage)
        if finished is not None:
            names = {"prompts": ("train", None), "trajectories": ("trajectories", "answer_tokens"), "pack": ("rows", "tokens")}
            rows, tokens = names.get(stage.kind, (None, "train_tokens"))
            estimate = replace(
                estimate,
                rows=finished.get(rows, estimate.rows),
                tokens=finished.get(tokens, estimate.tokens),
                seconds=0.0,
                disk_gb=0.0,
                scratch_gb=0.0,
            )
        self.found[stage.id] = estimate
        return estimate

    # ---- data

    def _prompts(self, stage: Stage) -> Estimate:
        config: PreparePromptsConfig = stage.config
        if config.source in SIZES and config.train == 0:  # a benchmark of its own
            rows: float | None = SIZES[config.source]
        else:
            rows = self.train_prompts
        seconds = None if rows is None else rows / PROMPTS_PER_SECOND
        return Estimate(rows=rows, seconds=seconds, disk_gb=None if rows is None else rows * self.texts.prompt * PROMPT_BYTES / GB)

    def _trajectories(self, stage: Stage) -> Estimate:
        config, workers = stage.config, self.cluster.workers
        gpus = workers * self.cluster.gpus_per_worker
        rows = self.found["prompts"].rows
        if config.prompts is not None:
            rows = config.prompts if rows is None else min(rows, config.prompts)
        answer = min(self.texts.answer, config.max_new_tokens)
        memory = None
        if self.shape:
            wide = TOGETHER[gpus > 0] * (1 + self.texts.prompt / answer)
            memory = decoding_memory(
                self.shape, dtype=config.dtype, texts=config.batch_size, longest=self.longest_prompt + config.max_new_tokens, wide=round(wide)
            )
        if rows is None:
            return Estimate(gpus=gpus, seconds=None, memory=memory, disk_gb=None)
        tokens = rows * answer
        rate = self.rates.get(("trajectories", config.block_size))
        seconds = None if rate is None else rate * tokens
        if rate is None and self.shape:
            taught = self.texts.taught_tpf if stage.inputs["model"] != "base" else 1.0
            seconds = self._collecting(config, answer, taught=taught) * rows / workers
        disk = tokens * (2.7 + 0.425 * config.block_size) / GB  # 9.5 bytes per answer token at 16, 16.3 at 32 (measured)
        return Estimate(rows, tokens, gpus, seconds, memory, disk, measured=rate is not None)

    def _collecting(self, config: Any, answer: float, *, taught: float) -> float:
        """Seconds of one answer on one worker: its share of the greedy forwards, then what is fed in wide ones."""
        kept = config.batch_size * (self.texts.prompt + answer / 2)
        step = self._forward(config.batch_size, 1, kept, config.dtype)
        states = config.block_size / 2 / taught  # fed per answer token until its block has converged
        wide = 2 * self.texts.prompt + answer * (1 + states)  # the prompt, its check together with the answer, and the states
        products = 2 * self.shape.multiplied * wide / (1e12 * self.hardware.tflops * self.hardware.decoding_share)
        return answer * step / config.batch_size + products

    def _pack(self, stage: Stage) -> Estimate:
        trajectories, room = self.found[stage.inputs["trajectories"]], stage.config.max_length
        self.rooms[stage.id] = room
        if trajectories.rows is None:
            return Estimate(seconds=None, disk_gb=None)
        sample = self.texts.prompt + 2 * trajectories.tokens / trajectories.rows
        rows = trajectories.rows / max(1.0, FILL * room / sample)
        tokens = trajectories.rows * sample
        return Estimate(rows, tokens, seconds=tokens / PACKED_PER_SECOND, disk_gb=tokens * PACKED_BYTES / GB)

    # ---- training

    def _base(self, stage: Stage) -> Estimate:
        size = self._weights_gb(self.model_dtype)
        seconds = None if size is None else 3 * size / WEIGHTS_GB_PER_SECOND
        if stage.config.path is None:  # pretrained here, on a CPU
            config = stage.config.pretrain
            tokens = config.steps * config.batch_size * (self.texts.prompt + self.texts.answer)
            seconds = self.hardware.training_seconds(self.shape, tokens=tokens, recompute=False) if self.shape else None
            return Estimate(config.steps * config.batch_size, tokens, seconds=seconds, disk_gb=size)
        return Estimate(seconds=seconds, disk_gb=size)

    def _distill(self, stage: Stage) -> Estimate:
        config, packed, ranks = stage.config, self.found[stage.inputs["packed"]], self.cluster.ranks
        gpus = ranks * self.cluster.gpus_per_worker
        room = self.rooms[stage.inputs["packed"]]
        memory = training_memory(self.shape, config, ranks=ranks, row=room, gpu=gpus > 0) if self.shape else None
        weights = self._weights_gb(config.dtype) or 0.0
        scratch = (KEPT_CHECKPOINTS * 3 + (3 if config.probe.every else 0)) * weights
        matched = config.matched if isinstance(config, MatchedDistillConfig) else {}
        theirs = {name: self.found[stage.inputs[f"budget/{name}"]] for name in matched}
        if packed.rows is None or any(pack.rows is None for pack in theirs.values()):
            return Estimate(gpus=gpus, seconds=None, memory=memory, disk_gb=weights, scratch_gb=scratch)
        each = packed.tokens / packed.rows
        if matched:
            packs = [(length, theirs[name]) for name, length in matched.items()]
            tokens = sum(_trained_rows(length, config.batch_size, pack.rows) * pack.tokens / pack.rows for length, pack in packs)
            rows = config.batch_size * max(1, round(tokens / (each * config.batch_size)))
        else:
            rows = _trained_rows(config, config.batch_size, packed.rows)
        tokens, rate = rows * each, self.rates.get(("distill", None))
        seconds = None if rate is None else rate * tokens
        if rate is None and self.shape:
            seconds = self.hardware.training_seconds(self.shape, tokens=tokens, recompute=config.activation_checkpointing) / ranks
        return Estimate(rows, tokens, gpus, seconds, memory, weights, scratch, measured=rate is not None)

    def _export(self, stage: Stage) -> Estimate:
        size = self._weights_gb(self.model_dtype)
        return Estimate(seconds=None if size is None else 4 * size / WEIGHTS_GB_PER_SECOND, disk_gb=size)

    # ---- evaluation

    def _answers(self, stage: Stage) -> Estimate:
        config = stage.config
        workers = self.cluster.workers if config.distributed else 1
        rows = self._asked(stage, config.accuracy_prompts)
        answer = min(self.texts.answer, config.max_new_tokens)
        tokens = rows * answer
        seconds = memory = None
        if self.shape:
            kept = config.batch_size * (self.texts.prompt + answer / 2)
            seconds = tokens / config.batch_size * self._forward(config.batch_size, 1, kept, config.dtype) / workers
            memory = decoding_memory(self.shape, dtype=config.dtype, texts=config.batch_size, longest=self.longest_prompt + config.max_new_tokens)
        gpus = workers * self.cluster.gpus_per_worker if config.distributed else self._one_gpu
        return Estimate(rows, tokens, gpus, seconds, memory, tokens * COMPLETION_BYTES / GB, measured=bool(self.latency))

    def _speed(self, stage: Stage) -> Estimate:
        config = stage.config
        rows = self._asked(stage, config.speed_prompts)
        answer = min(self.texts.answer, config.max_new_tokens)
        taught = self.texts.taught_tpf if stage.inputs["model"] != "base" else 1.0
        forwards = [(batch, s.block_size, taught if s.block_size > 1 else 1.0) for batch in config.batch_sizes for s in config.settings()]
        forwards += [(batch, 1, 1.0) for batch in config.batch_sizes if Reference.transformers in config.references]
        forwards += [(1, config.prompt_lookup_tokens, 1.0) for r in config.references if r is Reference.prompt_lookup]
        tokens = len(forwards) * rows * answer
        seconds = memory = None
        if self.shape:
            kept = self.texts.prompt + answer / 2
            each = (self._forward(b, wide, b * kept, config.dtype) / b / tpf for b, wide, tpf in forwards)
            seconds = rows * answer * sum(each)
            most = max(config.batch_sizes)
            memory = decoding_memory(self.shape, dtype=config.dtype, texts=most, longest=self.longest_prompt + config.max_new_tokens)
        return Estimate(rows, tokens, self._one_gpu, seconds, memory, tokens * COMPLETION_BYTES / GB, measured=bool(self.latency))

    def _latency(self, stage: Stage) -> Estimate:
        return Estimate(gpus=self._one_gpu, seconds=60.0)

    def _search(self, stage: Stage) -> Estimate:
        return Estimate(gpus=self._one_gpu, seconds=stage.config.budget_s)

    def _light(self, stage: Stage) -> Estimate:
        return Estimate(seconds=LIGHT_SECONDS)

    # ---- what several need

    @property
    def _one_gpu(self) -> float:
        return 1.0 if self.cluster.gpus_per_worker else 0.0

    def _asked(self, stage: Stage, most: int) -> float:
        """Of a benchmark no more than it has."""
        source = stage.inputs["prompts"]
        return min(most, self.test_prompts if source == "prompts" else self.found[source].rows or most)

    def _weights_gb(self, dtype: str) -> float | None:
        return self.shape.parameters * BYTES[dtype] / GB if self.shape else None

    def _forward(self, texts: int, tokens: int, cached: float, dtype: str) -> float:
        """Seconds of a forward over so many tokens per text: as measured, where such a curve reaches, else as declared."""
        curve = self.latency.get(texts, {})
        wider = min((m for m in curve if m >= tokens), default=None)
        if wider is not None:
            return curve[wider]
        return self.hardware.forward_seconds(self.shape, tokens=texts * tokens, cached=cached, dtype=dtype)


def _trained_rows(length: Length | DistillConfig, batch_size: int, rows: float) -> float:
    """Rows of all steps over a pack of `rows`, those seen several times counted as often."""
    steps = max(1, int(length.epochs * rows) // batch_size)
    return batch_size * (steps if length.max_steps is None else min(steps, length.max_steps))
