"""What every Ray Train worker runs: model, rows and watch around the loop; checkpoints to Ray; the selected weights to the stage's folder."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from jacobi_core.distillation.losses import PackedLoss
from jacobi_core.hub import load_model
from tasks import artifacts
from tasks.distill.config import Select
from tasks.distill.data import StepPlan
from tasks.distill.job import DistillJob
from tasks.distill.loop import Trainer
from tasks.distill.probe import Probe, probe_prompts
from tasks.distill.ranks import on_rank_zero
from tasks.distill.sharding import shard
from tasks.distill.start_checks import check_rows
from tasks.distill.stopping import StopFile
from tasks.distill.watch import Watch, told
from tasks.distill.weights import gathered, write_weights
from tasks.packed_files import PackedRows
from tasks.stage import Reporter, UserError
from tasks.stage_gauges import StageGauges


def train_worker(settings: dict[str, DistillJob]) -> None:
    """One rank, from the last checkpoint if there is one, to the end or to a polite stop. settings: {"job": ...}."""
    import ray.train

    job = settings["job"]
    if job.refused.exists():  # a mistake that an earlier attempt of this run found: another one finds it again
        return
    context = ray.train.get_context()
    try:
        _train(job, rank=context.get_world_rank(), workers=context.get_world_size())
    except UserError as error:
        artifacts.write_text(job.refused, str(error))
        raise


def _train(job: DistillJob, *, rank: int, workers: int) -> None:
    import ray.train

    torch.set_num_threads(job.threads)
    stop = StopFile(job.stop, rank=rank, workers=workers)
    rows = PackedRows(job.packed)
    trainer = make_trainer(job, rows, rank=rank, workers=workers)
    started = ray.train.get_checkpoint()
    if started is not None:
        with started.as_directory() as folder:
            trainer.resume(Path(folder))
    watch = make_watch(job, trainer) if job.config.probe.every and not trainer.finished else None
    modes = ray.train.CheckpointUploadMode
    local = _local_folder(job, rank)

    def save(trainer: Trainer) -> None:
        """Written to a local folder, and copied to the run's storage while training goes on; the last one before anything ends."""
        folder = local / str(trainer.step)
        trainer.save(folder)
        more = not trainer.finished and not stop.seen
        ray.train.report(
            {"step": trainer.step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),
            checkpoint_upload_mode=modes.ASYNC if more else modes.SYNC,
            delete_local_checkpoint_after_upload=True,
        )

    line = ProgressLine(job.report, trainer.plan.total_steps) if rank == 0 else (lambda point, step: None)
    trainer.run(log=line, save=save, probe=watch, stop=stop)
    for folder in (local, local.parent):
        with suppress(OSError):  # not empty: a checkpoint is still being copied, or another rank's
            folder.rmdir()
    if trainer.finished:
        finish(job, trainer)


def _local_folder(job: DistillJob, rank: int) -> Path:
    """Where this rank writes checkpoints before they are copied: one place per run and rank, so that a killed worker's are found and removed."""
    run = hashlib.sha256(str(job.output.resolve()).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"distill-{run}", f"rank{rank}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def make_trainer(job: DistillJob, rows: PackedRows, *, rank: int, workers: int) -> Trainer:
    """Model, loss and optimizer at step 0. Collective; raises UserError, on every rank, for what would fail later."""
    config = job.config
    plan = StepPlan.make(config, rows.lengths, token_budget=job.token_budget)
    model = load_model(job.model, dtype=config.dtype, device=torch.device("cpu"), trust_remote_code=job.trust_remote_code)
    on_rank_zero(lambda: check_rows(job.packed, rows, model), rank=rank, workers=workers)
    if config.lora.rank:
        from tasks.distill.adapters import with_adapters

        model = with_adapters(model, config.lora, config.seed)
    if config.activation_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    if torch.cuda.is_available():
        model.to(torch.device("cuda", torch.cuda.current_device()))
    try:
        loss = PackedLoss(model, window=rows.window, variant=config.mask, backend=config.attention, temperature=config.temperature)
    except ValueError as error:
        raise UserError(f"distill.attention={config.attention.value}: {error}") from error
    loss = shard(loss, workers=workers, compute_dtype=config.compute_dtype)
    return Trainer(loss, rows, plan, config, rank=rank, workers=workers)


def make_watch(job: DistillJob, trainer: Trainer) -> Watch:
    """Collective: rank 0 loads the teacher and asks it once; what it says is the first point, of step 0. It is never the best one."""
    probes: list[Probe] = []

    def prepare() -> dict[str, Any]:
        prompts = probe_prompts(job.prompts, job.config.probe.prompts)
        settings = dict(lora=job.config.lora, dtype=job.config.dtype, seed=job.config.seed, trust_remote_code=job.trust_remote_code)
        probes.append(Probe(job.model, prompts, job.config.probe, **settings))
        return told(probes[0].teacher, 0, job.report)

    teacher = on_rank_zero(prepare, rank=trainer.rank, workers=trainer.workers)
    if not trainer.probing.points:
        trainer.probing.points.append(teacher)
    return Watch(probes[0] if probes else None, write=weights_writer(job), folder=job.best, report=job.report)


def weights_writer(job: DistillJob) -> Callable[[Path, Mapping[str, torch.Tensor]], None]:
    """How rank 0 writes weights that were gathered."""

    def write(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
        write_weights(folder, state, source_model_folder=job.model, config=job.config, trust_remote_code=job.trust_remote_code)

    return write


def finish(job: DistillJob, trainer: Trainer) -> None:
    """The selected weights, and then training.json, which says that all is there. Collective."""
    best = trainer.probing.best
    selected = (best and best["step"]) if job.config.select is Select.best else trainer.step if trainer.probing.verdict is None else None
    state = gathered(trainer.loss, rank=trainer.rank) if selected == trainer.step else None

    def write() -> None:
        if state is not None:
            weights_writer(job)(job.weights, state)
        elif selected is not None and (job.best / str(selected)).exists():
            (job.best / str(selected)).replace(job.weights)
        if selected is not None and not job.weights.exists():
            raise RuntimeError(f"{job.best / str(selected)} is gone: somebody removed the best weights while training went on")
        artifacts.write_json(job.training, training_record(trainer, selected))

    on_rank_zero(write, rank=trainer.rank, workers=trainer.workers)


def training_record(trainer: Trainer, selected: int | None) -> dict[str, Any]:
    """What training.json holds; docs/schemas.md describes it."""
    probing = trainer.probing
    return {
        "config": asdict(trainer.config),  # for the card of the export
        "curves": trainer.curves.points,
        "probes": probing.points,
        "steps": trainer.step,
        "selected_step": selected,
        "best_step": probing.best and probing.best["step"],
        "verdict": probing.verdict,
        "collapsed_at": trainer.step if probing.verdict else None,
        "train_tokens": trainer.tokens_after(selected if selected is not None else trainer.step),
        "seconds": trainer.seconds,
    }


class ProgressLine:
    """Rank 0's voice: curves to the tracker, gauges to Ray, a line to the terminal every few seconds."""

    def __init__(self, report: Reporter, total_steps: int) -> None:
        self.report, self.total_steps, self.printed = report, total_steps, 0.0
        self.gauges = StageGauges("distill")

    def __call__(self, point: dict[str, float], step: int) -> None:
        self.report({f"distill/{name}": value for name, value in point.items()}, step)
        self.gauges.set(stage_progress=step / self.total_steps, train_tokens_per_second=point["tokens_per_second"])
        now = time.monotonic()
        if now - self.printed > 10 or step == self.total_steps:
            self.printed = now
            text = "  ".join(f"{k} {point[k]:.4f}" for k in ("consistency", "ar", "agreement"))
            rate = f"{point['tokens_per_second']:.0f} packed tokens/s"
            sys.stdout.write(f"distill: step {step}/{self.total_steps}  {text}  {rate}\n")  # Ray Train prints print() twice
            sys.stdout.flush()
