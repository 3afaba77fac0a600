"""Stage `roundN/distill`: Ray Train runs the loop on every worker; a killed worker or driver goes on from the last checkpoint."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks import artifacts
from tasks.distill.config import DistillConfig
from tasks.distill.data import StepPlan, check_divides
from tasks.stage import Reporter, StageContext

log = logging.getLogger(__name__)


def run(config: DistillConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: packed, model; and where this run must see as many tokens as other distillations, those as budget/NAME.

    Writes checkpoint/ (torch DCP) and training.json. Raises UserError where the batch cannot be shared by the workers.
    """
    check_divides(config, context.cluster.workers)
    budget = sum(artifacts.read_json(path / "training.json")["train_tokens"] for name, path in inputs.items() if name.startswith("budget/"))
    rows = artifacts.PackedRows(inputs["packed"] / "packed.parquet")
    plan = StepPlan.make(config, rows.lengths, token_budget=budget or None)
    log.info("distill: %d steps of %d rows, %d tokens", plan.total_steps, plan.batch_size, int(rows.lengths[plan.order].sum()))
    started = time.monotonic()
    progress = _fit(config, inputs, output, context, budget)
    training = {"curves": progress["curves"], "train_tokens": progress["curves"][-1]["tokens"], "seconds": time.monotonic() - started}
    artifacts.write_json(output / "training.json", training)
    last = progress["curves"][-1]
    return {"steps": progress["step"], "train_tokens": training["train_tokens"], **{k: last[k] for k in ("loss", "consistency", "ar", "agreement")}}


def _fit(config: DistillConfig, inputs: Mapping[str, Path], output: Path, context: StageContext, budget: int) -> dict[str, Any]:
    from tasks.cluster import start_ray, worker_env

    start_ray(context.cluster)
    from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cluster, storage = context.cluster, output / "ray"
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={
            "config": asdict(config),
            "packed": str(inputs["packed"]),
            "model": str(inputs["model"]),
            "budget": budget,
            "threads": cluster.threads_per_worker,
            "trust": context.trust_remote_code,
            "report": context.report,
        },
        torch_config=TorchConfig(backend="nccl" if cluster.gpus_per_worker else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=cluster.workers,
            use_gpu=bool(cluster.gpus_per_worker),
            resources_per_worker={"CPU": cluster.cpus_per_worker, **({"GPU": cluster.gpus_per_worker} if cluster.gpus_per_worker else {})},
        ),
        run_config=RunConfig(  # the same name and storage as an interrupted run's: Ray Train hands its last checkpoint to the workers
            name="train",
            storage_path=str(storage),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
            logging_config=LoggingConfig(log_level="WARNING"),
            worker_runtime_env={"env_vars": worker_env(cluster)},
        ),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as folder:
        shutil.rmtree(output / "checkpoint", ignore_errors=True)
        shutil.copytree(folder, output / "checkpoint")
    shutil.rmtree(storage)
    return artifacts.read_json(output / "checkpoint" / "progress.json")


def train_worker(settings: dict[str, Any]) -> None:
    """What every Ray Train worker runs."""
    import ray.train
    import torch

    from jacobi_core.hub import load_model
    from tasks.distill import checkpoint
    from tasks.distill.loop import Trainer
    from tasks.distill.sharding import shard

    torch.set_num_threads(settings["threads"])
    config, report = DistillConfig(**settings["config"]), settings["report"]
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    rows = artifacts.PackedRows(Path(settings["packed"]) / "packed.parquet")
    plan = StepPlan.make(config, rows.lengths, token_budget=settings["budget"] or None)
    model = load_model(settings["model"], dtype=config.dtype, trust_remote_code=settings["trust"])
    trainer = Trainer(shard(model, workers=workers), rows, plan, config, rank=rank, workers=workers)
    started = ray.train.get_checkpoint()
    if started is not None:
        with started.as_directory() as folder:
            trainer.resume(Path(folder))

    watch = _Progress(report, plan.total_steps) if rank == 0 else None

    def save(trainer: Trainer) -> None:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(Path(folder), trainer.model, trainer.optimizer, trainer.progress(), rank=rank)
            ray.train.report({"step": trainer.step}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    trainer.run(log=watch or (lambda point, step: None), save=save)


class _Progress:
    """Rank 0's voice: curves to the tracker, a line to the terminal every few seconds."""

    def __init__(self, report: Reporter, total_steps: int) -> None:
        self.report, self.total_steps, self.started, self.printed = report, total_steps, time.monotonic(), 0.0
        self.first: tuple[int, float] | None = None

    def __call__(self, point: dict[str, float], step: int) -> None:
        self.report({f"distill/{name}": value for name, value in point.items()}, step)
        now = time.monotonic()
        self.first = self.first or (point["tokens"], now)
        if now - self.printed > 10 or step == self.total_steps:
            self.printed = now
            rate = (point["tokens"] - self.first[0]) / max(now - self.first[1], 1e-9)
            text = "  ".join(f"{k} {point[k]:.4f}" for k in ("consistency", "ar", "agreement"))
            sys.stdout.write(f"distill: step {step}/{self.total_steps}  {text}  {rate:.0f} packed tokens/s\n")  # Ray Train prints print() twice
            sys.stdout.flush()
