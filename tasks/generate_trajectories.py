"""Stage `roundN/trajectories`: the model's own greedy answers to the training prompts, with every Jacobi state of every block.

The unit of work is a fixed shard of prompts with its own output file, so any number of workers, in any order, killed at any
moment and started again, ends with the same files. Ray Data spreads the shards over an actor pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks import artifacts
from tasks.stage import NOT_HASHED, StageContext, UserError, check_dtype

log = logging.getLogger(__name__)


@dataclass
class TrajectorySettings:
    """What all rounds share."""

    prompts: int | None = None  # how many training prompts; all by default
    max_new_tokens: int = 256  # answers are cut here
    batch_size: int = 32  # prompts decoded together; one shard, one file
    seed: int = 0  # of the random first guesses
    dtype: str = "float32"
    max_bad_share: float = field(default=0.01, metadata=NOT_HASHED)  # of prompts that may fail before the stage does


@dataclass
class GenerateTrajectoriesConfig(TrajectorySettings):
    """Raises ValueError naming the field for a value that cannot be used."""

    block_size: int = 16  # n

    def __post_init__(self) -> None:
        for name in ("block_size", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_dtype("dtype", self.dtype)
        if self.prompts is not None and self.prompts < 1:
            raise ValueError(f"prompts must be at least 1, got {self.prompts}")


def run(config: GenerateTrajectoriesConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model. Writes part-*.parquet and, where prompts failed, quarantine-*.json."""
    shards = make_shards(artifacts.read_prompts(inputs["prompts"], "train"), config)
    todo = [i for i in range(len(shards)) if not artifacts.trajectory_part(output, i).exists()]
    if len(todo) < len(shards):
        log.info("resuming: %d of %d shards are done", len(shards) - len(todo), len(shards))
    if todo:
        _run_shards(config, inputs, output, context, todo)
    return _summary(config, output, prompts=sum(len(s) for s in shards))


def make_shards(prompts: list[artifacts.Prompt], config: GenerateTrajectoriesConfig) -> list[list[artifacts.Prompt]]:
    """The first `prompts` prompts in batches of similar length: little padding, and independent of who collects them."""
    chosen = sorted(prompts[: config.prompts], key=lambda p: (len(p.input_ids), p.id))
    if not chosen:
        raise UserError("data: no training prompt is left to generate trajectories for")
    return [chosen[i : i + config.batch_size] for i in range(0, len(chosen), config.batch_size)]


def _run_shards(config: GenerateTrajectoriesConfig, inputs: Mapping[str, Path], output: Path, context: StageContext, todo: list[int]) -> None:
    from tasks.cluster import start_ray

    start_ray(context.cluster)
    import ray

    cluster = context.cluster
    rows = ray.data.from_items([{"shard": i} for i in todo], override_num_blocks=len(todo)).map_batches(
        _ShardCollector,
        fn_constructor_kwargs={
            "config": asdict(config),
            "inputs": {k: str(v) for k, v in inputs.items()},
            "output": str(output),
            "trust": context.trust_remote_code,
        },
        compute=ray.data.ActorPoolStrategy(size=min(cluster.workers, len(todo))),
        batch_size=1,
        num_cpus=cluster.cpus_per_worker,
        num_gpus=cluster.gpus_per_worker,
    )
    started, tokens, bad, last = time.monotonic(), 0, 0, 0.0
    for done, row in enumerate(rows.iter_rows(), start=1):
        tokens, bad = tokens + row["answer_tokens"], bad + row["quarantined"]
        seconds = time.monotonic() - started
        if seconds - last > 5 or done == len(todo):
            last = seconds
            log.info("trajectories: %d/%d shards, %.0f answer tokens/s, %d quarantined", done, len(todo), tokens / seconds, bad)
            context.report({"trajectories/shards": done, "trajectories/answer_tokens_per_s": tokens / seconds}, done)


class _ShardCollector:
    """A Ray actor: loads the model once, then turns shard numbers into files."""

    def __init__(self, *, config: dict[str, Any], inputs: dict[str, str], output: str, trust: bool) -> None:
        import torch

        from jacobi_core.decoding.tokens import TokenRules
        from jacobi_core.hub import load_model, load_tokenizer

        self.config, self.output = GenerateTrajectoriesConfig(**config), Path(output)
        self.shards = make_shards(artifacts.read_prompts(Path(inputs["prompts"]), "train"), self.config)
        self.model = load_model(inputs["model"], dtype=self.config.dtype, trust_remote_code=trust)
        self.rules = TokenRules.of(self.model, load_tokenizer(inputs["model"], trust_remote_code=trust))
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        shard = int(batch["shard"][0])
        trajectories, failures = self._collect(self.shards[shard])
        for trajectory in trajectories:
            trajectory.validate()
        quarantine = self.output / f"quarantine-{shard:06d}.json"
        if failures:
            artifacts.write_json(quarantine, failures)
        else:
            quarantine.unlink(missing_ok=True)  # of an attempt that ended before its part was written
        artifacts.write_trajectories(artifacts.trajectory_part(self.output, shard), trajectories)
        return {"shard": [shard], "answer_tokens": [sum(len(t.answer_ids) for t in trajectories)], "quarantined": [len(failures)]}

    def _collect(self, prompts: list[artifacts.Prompt]) -> tuple[list[Any], list[dict[str, Any]]]:
        """A whole shard at once; where that fails, prompt by prompt, so that one bad row costs one row."""
        from jacobi_core.trajectories.collect import collect

        c = self.config
        settings = {"block_size": c.block_size, "max_new_tokens": c.max_new_tokens, "seed": c.seed, "rules": self.rules}
        try:
            return collect(self.model, [p.input_ids for p in prompts], [p.id for p in prompts], **settings).trajectories, []
        except Exception as error:
            if len(prompts) == 1:
                return [], [{"id": prompts[0].id, "error": f"{type(error).__name__}: {error}"}]
        results = [self._collect([p]) for p in prompts]
        return [t for good, _ in results for t in good], [f for _, bad in results for f in bad]


def _summary(config: GenerateTrajectoriesConfig, output: Path, *, prompts: int) -> dict[str, float]:
    failures = [f for path in sorted(output.glob("quarantine-*.json")) for f in artifacts.read_json(path)]
    if len(failures) > config.max_bad_share * prompts or len(failures) == prompts:
        raise UserError(
            f"{len(failures)} of {prompts} prompts failed, more than trajectories.max_bad_share={config.max_bad_share}; "
            f"the first: id {failures[0]['id']}: {failures[0]['error']}"
        )
    rows = answer_tokens = states = blocks = ended = 0
    for t in artifacts.read_trajectories(output):
        rows, answer_tokens, blocks = rows + 1, answer_tokens + len(t.answer_ids), blocks + len(t.states)
        states += sum(len(s) for s in t.states)
        ended += t.stop_reason == "eos"
    if rows + len(failures) != prompts:
        raise UserError(f"{output}: holds {rows} trajectories and {len(failures)} quarantined rows for {prompts} prompts; force this stage")
    size = sum(p.stat().st_size for p in output.glob("part-*.parquet"))
    return {
        "prompts": prompts,
        "trajectories": rows,
        "quarantined": len(failures),
        "answer_tokens": answer_tokens,
        "states_per_block": states / blocks,
        "eos_share": ended / rows,
        "bytes_per_answer_token": size / answer_tokens,
    }
