"""Starting Ray for a stage, and refusing at once what a cluster can never place. Knows nothing about any one stage."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tasks.stage import ClusterConfig, UserError

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's name for the variable that holds a submitted job's runtime environment
PASSED_ON = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|MLFLOW_TRACKING|MLFLOW_S3|MLFLOW_HTTP|AWS|NCCL|GLOO|TORCH|PYTORCH)_|(HTTPS?|NO|ALL)_PROXY$", re.I
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|USERNAME|KEY", re.I)
STATE_ADDRESS = "RAY_API_SERVER_ADDRESS"  # Ray's name for the variable that says whose state is asked for
NOBODY = "http://127.0.0.1:9"  # the discard port


class _Process:
    """What this process has done about Ray."""

    seconds = 0.0  # spent importing and starting it
    is_task = False  # it is one of Ray's, and runs a stage as a task


def start_seconds() -> float:
    """Seconds this process has spent in `start_ray`."""
    return _Process.seconds


def worker_mistakes(cluster: ClusterConfig) -> Iterator[str]:
    """What cannot be, each naming the field and the fix. Arithmetic only, for a local cluster; an existing one is asked by start_ray."""
    if cluster.parallel_stages is not None and cluster.parallel_stages < 1:
        yield f"cluster.parallel_stages must be at least 1, got {cluster.parallel_stages}; leave it out to run as many as there is room for"
    wrong = [name for name in ("workers", "threads_per_worker", "num_cpus") if getattr(cluster, name) < 1]
    yield from (f"cluster.{name} must be at least 1, got {getattr(cluster, name)}" for name in wrong)
    if "workers" not in wrong and cluster.min_workers is not None and not 1 <= cluster.min_workers <= cluster.workers:
        yield f"cluster.min_workers must be between 1 and cluster.workers={cluster.workers}, got {cluster.min_workers}"
    if "workers" not in wrong and cluster.train_workers is not None and not 1 <= cluster.train_workers <= cluster.workers:
        yield f"cluster.train_workers must be between 1 and cluster.workers={cluster.workers}, got {cluster.train_workers}"
    negative = [name for name in ("cpus_per_worker", "gpus_per_worker") if getattr(cluster, name) < 0]
    yield from (f"cluster.{name} must not be negative, got {getattr(cluster, name)}" for name in negative)
    if cluster.address is None:
        if not (wrong or negative):
            yield from _shortages(cluster, {"CPU": cluster.num_cpus, "GPU": math.inf})  # Ray counts a machine's GPUs when it starts
    elif "://" in cluster.address:
        yield (
            f"cluster.address={cluster.address}: Ray Client and job server addresses are not supported; give HOST:PORT of the cluster "
            "(port 6379) from a machine that is part of it, or send the run there: ray job submit (docs/cluster.md)"
        )


def _shortages(cluster: ClusterConfig, available: dict[str, float]) -> Iterator[str]:
    # one CPU stays free: Ray Data's readers and Ray Train's controller need it, and wait for ever otherwise
    for resource, each, spare in (("CPU", cluster.cpus_per_worker, 1), ("GPU", cluster.gpus_per_worker, 0)):
        needed = cluster.workers * each + spare
        if each and needed > available.get(resource, 0):
            yield (
                f"cluster.workers={cluster.workers} needs {needed:g} {resource}s ({each:g} per worker{', 1 spare' if spare else ''}), "
                f"the cluster has {available.get(resource, 0):g}: lower cluster.workers or enlarge the cluster (cluster.num_cpus when local)"
            )


def start_ray(cluster: ClusterConfig) -> None:
    """Connect to cluster.address or start a local Ray; does nothing when Ray already runs. Raises UserError where work cannot be placed.

    Inside a Ray task, as a stage may be, Ray runs already: it is the one that runs the task.
    """
    began = time.monotonic()
    try:
        _start(cluster)
    finally:
        _Process.seconds += time.monotonic() - began


def _start(cluster: ClusterConfig) -> None:
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
        env = {
            name: value for name, value in {**passed_on(cluster), **worker_env(cluster)}.items() if name not in (_of_this_job().get("env_vars") or {})
        }
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            _knock(address)
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True, runtime_env={"env_vars": env}, **local)
        except (OSError, RuntimeError, ValueError) as error:
            if cluster.address is None:
                raise
            raise UserError(_cannot_join(cluster.address, error)) from error
        _restore_sigterm(on_sigterm)
    ray.data.DataContext.get_current().enable_progress_bars = False  # stages print one line of their own
    logging.getLogger("ray.data").setLevel(logging.WARNING)  # after its import, which sets it
    for shortage in (*_shortages(cluster, ray.cluster_resources()), *_too_wide(cluster, nodes())):
        raise UserError(shortage)


def nodes() -> tuple[tuple[float, float], ...]:
    """CPUs and GPUs of every machine of the cluster, whether free or not."""
    import ray

    return tuple((there.get("CPU", 0.0), there.get("GPU", 0.0)) for there in (node["Resources"] for node in ray.nodes() if node["Alive"]))


def _too_wide(cluster: ClusterConfig, machines: Sequence[tuple[float, float]]) -> Iterator[str]:
    """A worker runs on one machine, however much all of them have together."""
    if not any(cluster.cpus_per_worker <= cpus and cluster.gpus_per_worker <= gpus for cpus, gpus in machines):
        yield (
            f"cluster.cpus_per_worker={cluster.cpus_per_worker:g}, cluster.gpus_per_worker={cluster.gpus_per_worker:g}: no node of the cluster "
            f"has as much (CPUs and GPUs of each: {', '.join(f'{cpus:g} and {gpus:g}' for cpus, gpus in machines)}); lower them"
        )


def _restore_sigterm(handler: Any) -> None:
    """Ray's core puts a handler of its own below Python's, which aborts the process on SIGTERM: no run would be told that it was killed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler if callable(handler) else signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def become_task() -> None:
    """This process is Ray's own, and runs a stage: what ends Ray must leave it alone. Whatever the stage started ends with the process."""
    _Process.is_task = True


def stop_local_ray(cluster: ClusterConfig) -> None:
    """End the Ray that this process has started, if it has; the next stage that needs one starts it again. An existing cluster is left alone."""
    ray = sys.modules.get("ray")
    if ray is not None and cluster.address is None and not _Process.is_task and ray.is_initialized():
        ray.shutdown()


def leave_ray() -> None:
    """End this process's session and with it all work that it has given to Ray, on whichever cluster."""
    import ray

    if not _Process.is_task:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises OSError at once where nobody listens: Ray would try for two minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _cannot_join(address: str, error: Exception) -> str:
    told = " ".join(str(error).split())
    if "ersion mismatch" in told:
        return f"cluster.address={address}: {told[:300]}; install the same versions here and on every node"
    return (
        f"cluster.address={address}: no Ray cluster can be joined there from this machine ({told[:300]}); give HOST:PORT of its head, "
        "on a machine that is itself a node of the cluster (`ray start --address=HOST:PORT`), or use `ray job submit` (docs/cluster.md)"
    )


def in_working_dir() -> bool:
    """Whether this process is a job sent with a working directory."""
    return "working_dir" in _of_this_job()


def _of_this_job() -> dict[str, Any]:
    """The runtime environment that `ray job submit` gave to this process."""
    return json.loads(os.environ.get(JOB) or "{}").get("runtime_env") or {}


def passed_on(cluster: ClusterConfig) -> dict[str, str]:
    """Of this process's environment, what workers on other machines need too: a local Ray inherits it.

    Neither places on a disk, which are each machine's own, nor secrets, which Ray's dashboard would show.
    """
    if cluster.address is None:
        return {}
    names = [name for name in os.environ if PASSED_ON.match(name) and not SECRET.search(name)]
    return {name: os.environ[name] for name in sorted(names) if not os.path.isabs(os.environ[name])}


def worker_env(cluster: ClusterConfig) -> dict[str, str]:
    """Environment of every worker process: threads are fixed before torch is imported, or two workers fight for the cores."""
    threads = {"OMP_NUM_THREADS": str(cluster.threads_per_worker), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    return threads | _state_of(cluster)


def _state_of(cluster: ClusterConfig) -> dict[str, str]:
    """Ray Train's PlacementGroupCleaner asks whether its controller lives, of any Ray that it finds on its machine: another one's answer, that
    it does not know it, ends a training. So it is told whom to ask, and of a local Ray, which answers no such questions, nobody.
    """
    address = NOBODY if cluster.address is None else cluster.address
    return {} if address == "auto" or STATE_ADDRESS in os.environ else {STATE_ADDRESS: address}
