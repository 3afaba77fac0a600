"""Stage `roundN/trajectories`: the model's own greedy answers to the training prompts, with the Jacobi states of every block.

The unit of work is a fixed shard of prompts with its own output file, so any number of workers, in any order, killed at any
moment and started again, ends with the same files.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from jacobi_core.trajectories.quality import REASONS
from tasks import artifacts
from tasks.generate_trajectories.collector import ModelCollector
from tasks.generate_trajectories.config import Collect, GenerateTrajectoriesConfig
from tasks.generate_trajectories.worker import ATTEMPT, Collector, ShardJob, cannot_write, is_finished, part_counts, quarantine_file, read_dropped
from tasks.stage import StageContext, UserError
from tasks.trajectory_files import read_ids, trajectory_part

log = logging.getLogger(__name__)


def run(
    config: GenerateTrajectoriesConfig,
    inputs: Mapping[str, Path],
    output: Path,
    context: StageContext,
    *,
    make_collector: Callable[[], Collector] | None = None,
) -> dict[str, float]:
    """inputs: prompts, model. Writes part-*.parquet and, where prompts failed or answers were dropped, quarantine-*.json and dropped-*.json.

    make_collector: for tests that bring no model; picklable, see `worker.ShardJob`.
    """
    job, ids = make_job(config, inputs, output, context, make_collector)
    try:  # before any model is loaded
        probe = output / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise cannot_write(output, error) from error
    todo = [i for i in range(job.shards) if not is_finished(output, i)]
    if len(todo) < job.shards:
        log.info("resuming: %d of %d shards are done", job.shards - len(todo), job.shards)
    if todo:
        from tasks.generate_trajectories.plan import run_shards

        run_shards(job, todo, context, stall_timeout=config.stall_timeout, max_bad=config.max_bad_share * job.count)
    for left in output.glob(f"{ATTEMPT}*"):  # of workers that were killed
        left.unlink(missing_ok=True)
    return summary(config, job, ids)


def make_job(
    config: GenerateTrajectoriesConfig,
    inputs: Mapping[str, Path],
    output: Path,
    context: StageContext,
    make_collector: Callable[[], Collector] | None = None,
) -> tuple[ShardJob, np.ndarray]:
    """The shards of a run, and the ids of all its prompts, int64. The driver reads no prompt: 450,000 of them are a few MB."""
    ids = artifacts.PromptRows(inputs["prompts"], "train").ids[: config.prompts]
    if not len(ids):
        raise UserError("data: no training prompt is left to generate trajectories for")
    metadata = {"collect": config.collect.value}
    if config.schedule is not None:
        metadata["schedule"] = json.dumps(asdict(config.schedule))
    job = ShardJob(
        make_collector=make_collector or ModelCollector(str(inputs["model"]), context.trust_remote_code, config),
        prompts=Path(inputs["prompts"]),
        output=output,
        count=len(ids),
        shard_size=config.shard_size,
        attempt_of=uuid.uuid4().hex,
        metadata=metadata,
    )
    return job, ids


def summary(config: GenerateTrajectoriesConfig, job: ShardJob, ids: np.ndarray) -> dict[str, float]:
    """Metrics of a complete set. Raises UserError where it is not: every prompt has to be in one part, dropped or in quarantine, once."""
    failures = [f for i in range(job.shards) if (path := quarantine_file(job.output, i)).exists() for f in artifacts.read_json(path)]
    if len(failures) > config.max_bad_share * job.count or len(failures) == job.count:
        raise UserError(
            f"{len(failures)} of {job.count} prompts failed, more than trajectories.max_bad_share={config.max_bad_share}; "
            f"the first: id {failures[0]['id']}: {failures[0]['error']}"
        )
    parts = [trajectory_part(job.output, i) for i in range(job.shards)]
    dropped = [identity for i in range(job.shards) for identity in read_dropped(job.output, i)]
    found = np.concatenate([*map(read_ids, parts), np.array([f["id"] for f in failures] + dropped, np.int64)])
    if not np.array_equal(np.sort(found), np.sort(ids)):
        kept = len(found) - len(failures) - len(dropped)
        raise UserError(
            f"{job.output}: holds {kept} trajectories, {len(failures)} quarantined and {len(dropped)} dropped rows, "
            f"{len(np.setdiff1d(ids, found))} of {job.count} prompts are missing; force this stage"
        )
    counts = [part_counts(part) for part in parts]
    total = {name: sum(c[name] for c in counts) for name in counts[0]}
    if not total["trajectories"]:
        said = ", ".join(f"{reason} {total[f'dropped_{reason}']}" for reason in REASONS)
        raise UserError(f"trajectories.quality: no answer is left, {len(dropped)} of {job.count} were dropped ({said}); loosen its rules")
    tokens = total["answer_tokens"]
    return {
        "prompts": job.count,
        "trajectories": total["trajectories"],
        "quarantined": len(failures),
        **{f"dropped_{reason}": total[f"dropped_{reason}"] for reason in REASONS},
        "answer_tokens": tokens,
        "disagreements": total["disagreements"],
        "eos_share": total["ended"] / total["trajectories"],
        "bytes_per_answer_token": sum(part.stat().st_size for part in parts) / tokens,
        **({"states_per_block": total["forwards"] / total["blocks"] + 1} if config.collect is Collect.all else {}),
    }
