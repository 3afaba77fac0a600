"""A distillation small enough for seconds: random packed rows, one trainer per rank, and ranks as processes."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from jacobi_core.distillation.losses import PackedLoss
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import join_samples, pack_trajectory
from jacobi_core.trajectories.collect import collect
from tasks.distill.adapters import with_adapters
from tasks.distill.config import DistillConfig
from tasks.distill.curves import MEASURED
from tasks.distill.data import StepPlan
from tasks.distill.loop import Trainer
from tasks.distill.sharding import shard
from tasks.packed_files import PackedRows, write_packed
from tests.core.tiny import random_prompts, tiny_model, tiny_rules

SETTINGS = DistillConfig(
    learning_rate=1e-2, batch_size=8, epochs=2, ar_weight=2.0, checkpoint_every=2, log_every=1, warmup_share=0.25, dtype="float64"
)


def write_rows(path: Path, *, rows: int, per_row: int = 1, window: int = 2) -> Path:
    """Rows of a random model's own answers, of different lengths; returns the file."""
    model, count = tiny_model(seed=1), rows * per_row
    prompts = random_prompts(count, seed=4)
    found = collect(model, prompts, list(range(count)), block_size=4, max_new_tokens=14, seed=0, rules=tiny_rules(model, eos_ids=(10, 20, 30)))
    schedule = NoiseSchedule(window=window)
    samples = [pack_trajectory(t, schedule)[0] for t in found.trajectories]
    joined = [join_samples(samples[i : i + per_row]) for i in range(0, count, per_row)]
    write_packed(path, joined, schedule=schedule, max_length=max(map(len, joined)))
    return path


def changed(**settings: Any) -> DistillConfig:
    return dataclasses.replace(SETTINGS, **settings)


def make_trainer(path: Path, config: DistillConfig = SETTINGS, *, rank: int = 0, workers: int = 1, **model: Any) -> Trainer:
    rows, inner = PackedRows(path), tiny_model(**{"seed": 1, **model})
    if config.lora.rank:
        inner = with_adapters(inner, config.lora, config.seed)
    loss = PackedLoss(inner, window=rows.window, variant=config.mask, temperature=config.temperature)
    loss = shard(loss, workers=workers, compute_dtype=config.compute_dtype)
    return Trainer(loss, rows, StepPlan.make(config, rows.lengths), config, rank=rank, workers=workers)


def silent(*_: Any) -> None:
    pass


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.loss.named_parameters()}


def reproducible(points: list[dict[str, float]]) -> list[dict[str, float]]:
    """Curves without what was measured with a clock."""
    return [{name: value for name, value in point.items() if name not in MEASURED} for point in points]


def exit_codes(work: Callable[..., None], *arguments: Any, workers: int) -> list[int | None]:
    """work(rank, workers, *arguments) in that many processes with a gloo group, none ended by another; None: it hung."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = mp.get_context("spawn")
    processes = [spawn.Process(target=_rank, args=(rank, workers, port, work, arguments)) for rank in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
    found = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return found


def in_ranks(work: Callable[..., None], *arguments: Any, workers: int) -> None:
    """work(rank, workers, *arguments) in that many processes with a gloo group; raises what the first failing one raised.

    They are forked from a server that has torch imported and nothing computed: a backward in a fork of this process would be refused.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(_rank, args=(workers, port, work, arguments), nprocs=workers, start_method="forkserver")


def _rank(rank: int, workers: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers, timeout=timeout)
    work(rank, workers, *arguments)
    dist.destroy_process_group()
