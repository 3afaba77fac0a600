"""Starting Ray for a stage, and refusing at once what a cluster can never place. Knows nothing about any one stage."""

from __future__ import annotations

import logging
import math
import os
import sys
from typing import Any

from tasks.stage import ClusterConfig, UserError


def check_workers(cluster: ClusterConfig) -> None:
    """Arithmetic only, for a local cluster; raises UserError naming the field. An existing cluster is asked by start_ray."""
    for name in ("workers", "threads_per_worker", "num_cpus"):
        if getattr(cluster, name) < 1:
            raise UserError(f"cluster.{name} must be at least 1, got {getattr(cluster, name)}")
    if cluster.min_workers is not None and not 1 <= cluster.min_workers <= cluster.workers:
        raise UserError(f"cluster.min_workers must be between 1 and cluster.workers={cluster.workers}, got {cluster.min_workers}")
    for name in ("cpus_per_worker", "gpus_per_worker"):
        if getattr(cluster, name) < 0:
            raise UserError(f"cluster.{name} must not be negative, got {getattr(cluster, name)}")
    if cluster.address is None:
        _check_fits(cluster, {"CPU": cluster.num_cpus, "GPU": math.inf})  # Ray counts a machine's GPUs when it starts


def _check_fits(cluster: ClusterConfig, available: dict[str, float]) -> None:
    # one CPU stays free: Ray Data's readers and Ray Train's controller need it, and wait for ever otherwise
    for resource, each, spare in (("CPU", cluster.cpus_per_worker, 1), ("GPU", cluster.gpus_per_worker, 0)):
        needed = cluster.workers * each + spare
        if each and needed > available.get(resource, 0):
            raise UserError(
                f"cluster.workers={cluster.workers} needs {needed:g} {resource}s ({each:g} per worker{', 1 spare' if spare else ''}), "
                f"the cluster has {available.get(resource, 0):g}: lower cluster.workers or enlarge the cluster (cluster.num_cpus when local)"
            )


def start_ray(cluster: ClusterConfig) -> None:
    """Connect to cluster.address or start a local Ray; does nothing when Ray already runs. Raises UserError where work cannot be placed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a thread of Ray's that outlives ray.shutdown() must not start a Ray of its own
    # Ray Train's watchdog asks the dashboard, which a local Ray does not start, and says so every second; and every rank tells every checkpoint
    noise = "Failed to query Ray Train Controller actor state|Reporting training result|Checkpoint successfully created"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", noise)
    import ray

    if not ray.is_initialized():
        local: dict[str, Any] = {} if cluster.address else {"num_cpus": cluster.num_cpus, "include_dashboard": False}
        address = cluster.address or "local"  # without one Ray would join whatever cluster was started on this machine last
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True, runtime_env={"env_vars": worker_env(cluster)}, **local)
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        data = ray.data.DataContext.get_current()
        data.enable_progress_bars = False  # stages print one line of their own
    _check_fits(cluster, ray.cluster_resources())


def stop_local_ray(cluster: ClusterConfig) -> None:
    """End the Ray that this process has started, if it has; the next stage that needs one starts it again. An existing cluster is left alone."""
    ray = sys.modules.get("ray")
    if ray is not None and cluster.address is None and ray.is_initialized():
        ray.shutdown()


def worker_env(cluster: ClusterConfig) -> dict[str, str]:
    """Environment of every worker process: threads are fixed before torch is imported, or two workers fight for the cores."""
    return {"OMP_NUM_THREADS": str(cluster.threads_per_worker), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
