"""Before the first stage: can this cluster do the work? Only where Ray has something to run; `tasks/cluster_checks.py` does the asking."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jacobi_core.distillation.noise_schedule import is_own
from pipelines.config.schema import PipelineConfig
from pipelines.graph.dag import PlannedStage
from pipelines.graph.room import as_ray_work
from tasks.cluster_checks import check_cluster, check_own_gpus, gpus_here
from tasks.machine import multiplies_bfloat16, threads_sleep

log = logging.getLogger(__name__)


def check_before_the_first_stage(config: PipelineConfig, planned: Sequence[PlannedStage]) -> None:
    """Raises UserError, one line per mistake. Starts no Ray for a run that is cached or that this process does alone."""
    to_run = [p.stage.needs for p in planned if not p.cached]
    if to_run:
        _warn_of_slow_products(config)
    timed = [p.stage.id for p in planned if not p.cached and p.stage.needs.alone]
    if timed and not config.cluster.gpus_per_worker and threads_sleep():
        log.warning("%s: timed while OMP_WAIT_POLICY=PASSIVE makes forwards over several tokens slower; unset it", ", ".join(timed))
    if not as_ray_work(config.cluster, to_run) and not any(needs.spread for needs in to_run):
        return
    if config.cluster.address is None:
        check_own_gpus(config.cluster)
        return
    if timed and config.cluster.gpus_per_worker and gpus_here() == 0:
        log.warning("%s: timed on this machine, which has no GPU; start the command on one that has (docs/cluster.md)", ", ".join(timed))
    folder = planned[0].folder.parent
    on_objects = "://" in config.paths.store and not config.paths.store.startswith("file:")
    kinds = {config.noise_schedule, *(r.noise_schedule for r in config.rounds if r.noise_schedule)}
    modules = [kind.partition(":")[0] if ":" in kind else kind.rpartition(".")[0] for kind in sorted(kinds) if is_own(kind)]
    check_cluster(config.cluster, folder=folder, setting="paths.work" if on_objects else "paths.store", modules=modules)


def _warn_of_slow_products(config: PipelineConfig) -> None:
    """Where the workers are this machine's processors and cannot multiply what they are asked to."""
    if config.cluster.address is not None or config.cluster.gpus_per_worker or multiplies_bfloat16() is not False:
        return
    asked = {
        "model.pretrain.compute_dtype": None if config.model.path else config.model.pretrain.compute_dtype,
        "trajectories.dtype": config.trajectories.dtype,
        "distill.compute_dtype": config.distill.compute_dtype,
        "evaluate.dtype": config.evaluate.dtype,
    }
    if slow := [name for name, dtype in asked.items() if dtype == "bfloat16"]:
        log.warning("%s: this processor has no instructions for bfloat16 (amx_bf16, avx512_bf16), so float32 is faster here", ", ".join(slow))
