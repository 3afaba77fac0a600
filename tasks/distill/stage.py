"""Stage `roundN/distill`: Ray Train runs the loop on every worker; killed workers, a killed driver and a polite stop go on from the last
checkpoint, and end with the same weights."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks import artifacts
from tasks.distill.config import DistillConfig, MatchedDistillConfig, Select
from tasks.distill.data import StepPlan, check_divides
from tasks.distill.job import DistillJob
from tasks.distill.left_behind import end_left_behind
from tasks.distill.stopping import stop_politely
from tasks.packed_files import PackedRows
from tasks.stage import StageContext, UserError

log = logging.getLogger(__name__)
PACKED_ROWS = "packed.parquet"
MAX_FAILURES = 8  # workers lost in one run before a person is asked; what fails at the same step each time is told after as many tries


def run(config: DistillConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: packed, model; with a probe also prompts; of a MatchedDistillConfig also what the others pack, as budget/NAME.

    Writes weights/ (the selected weights, without tokenizer; adapters only with LoRA) and training.json. Raises UserError where the batch
    cannot be shared by the workers, where rows and model do not fit, and where the probe saw the model collapse (see Select).
    """
    check_divides(config, context.cluster.ranks)
    job = DistillJob(
        config=config,
        packed=inputs["packed"] / PACKED_ROWS,
        model=inputs["model"],
        prompts=inputs.get("prompts"),
        output=output,
        token_budget=_matched_tokens(config, inputs) if isinstance(config, MatchedDistillConfig) else None,
        threads=context.cluster.threads_per_worker,
        trust_remote_code=context.trust_remote_code,
        report=context.report,
    )
    if not job.training.exists():
        rows = PackedRows(job.packed)
        plan = StepPlan.make(config, rows.lengths, token_budget=job.token_budget)
        log.info("distill: %d steps of %d rows, %d tokens", plan.total_steps, plan.batch_size, plan.tokens(rows.lengths))
        _fit(job, context)
    training = artifacts.read_json(job.training)
    shutil.rmtree(job.storage, ignore_errors=True)  # only now: without training.json it holds all that there is
    _check_collapse(job, training)
    shutil.rmtree(job.best, ignore_errors=True)
    return _metrics(training)


def _matched_tokens(config: MatchedDistillConfig, inputs: Mapping[str, Path]) -> int:
    """Of all steps that the others plan: known as soon as their rows are packed, and exactly what they train on."""
    total = 0
    for name, length in config.matched.items():
        lengths = PackedRows(inputs[f"budget/{name}"] / PACKED_ROWS).lengths
        theirs = dataclasses.replace(config, epochs=length.epochs, max_steps=length.max_steps)
        total += StepPlan.make(theirs, lengths).tokens(lengths)
    return total


def _fit(job: DistillJob, context: StageContext) -> None:
    """Until training.json is there. Raises what a worker raised, in one line where that was a UserError."""
    from tasks.cluster import start_ray, worker_env

    cluster = context.cluster
    start_ray(cluster)
    if cluster.address:
        end_left_behind()
    from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from tasks.distill.worker import train_worker

    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="nccl" if cluster.gpus_per_worker else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=cluster.ranks,
            use_gpu=bool(cluster.gpus_per_worker),
            resources_per_worker={"CPU": cluster.cpus_per_worker, **({"GPU": cluster.gpus_per_worker} if cluster.gpus_per_worker else {})},
        ),
        run_config=RunConfig(  # the same name and storage as an interrupted run's: Ray Train hands its last checkpoint to the workers
            name="train",
            storage_path=str(job.storage),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
            logging_config=LoggingConfig(log_level="WARNING"),
            worker_runtime_env={"env_vars": worker_env(cluster)},
        ),
    )
    job.refused.unlink(missing_ok=True)
    failure: Exception | None = None
    try:
        stop_politely(trainer.fit, job.stop)
    except Exception as error:
        failure = error
    if job.refused.exists():
        message = job.refused.read_text(encoding="utf-8")
        job.refused.unlink()
        raise UserError(message) from failure
    if failure:
        raise failure


def _check_collapse(job: DistillJob, training: Mapping[str, Any]) -> None:
    """A collapse is an error unless the best weights are wanted and there are some. training.json stays: the same command says so again."""
    if training["verdict"] is None:
        return
    if job.config.select is Select.best and training["selected_step"] is not None:
        log.warning("distill: %s; training ended there, the weights of step %d are taken", training["verdict"], training["selected_step"])
        return
    kept = f"the best weights before it are in {job.best / str(training['best_step'])}" if training["best_step"] else "no probe before it was healthy"
    other = ", or set distill.select=best, which trains again and ends with those" if training["best_step"] else ""
    raise UserError(f"distill: {training['verdict']}; {kept}. Lower distill.learning_rate or raise distill.ar_weight{other}")


def _metrics(training: Mapping[str, Any]) -> dict[str, float]:
    last = training["curves"][-1]
    metrics = {"steps": training["steps"], "train_tokens": training["train_tokens"]}
    metrics |= {name: last[name] for name in ("loss", "consistency", "ar", "agreement", "tokens_per_second", "data_wait_share")}
    if training["probes"]:
        selected = next((p for p in training["probes"] if p["step"] == training["selected_step"]), training["probes"][-1])
        metrics |= {f"probe_{name}": value for name, value in selected.items() if isinstance(value, float)}
        metrics["selected_step"] = training["selected_step"]
    if training["collapsed_at"] is not None:
        metrics["collapsed_at"] = training["collapsed_at"]
    return metrics
