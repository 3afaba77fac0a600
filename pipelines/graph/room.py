"""What a stage needs of the machines, and whether a cluster has room for several stages at once. Arithmetic only; Ray is started elsewhere.

    spread      trajectories, distill, answers on Ray    workers x what each takes, and a spare CPU for readers and controllers
    computing   base, answers                            one accelerator, or the threads that torch takes of a CPU
    light       all others                               one CPU; evaluate as many as its sandbox
    timed       speed, latency, search                   this machine, with nothing beside it

Prompts, and the import of a base, run in this process in any case: what they read may lie on this machine alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tasks.stage import ClusterConfig


@dataclass(frozen=True)
class Needs:
    """Of one stage. No part of a fingerprint."""

    cpus: float = 1
    gpus: float = 0
    spread: bool = False  # its work is done by workers that Ray places; the stage itself only waits for them
    here: bool = False  # it runs in this process
    alone: bool = False  # nothing else of this run runs meanwhile: it is timed

    @classmethod
    def workers(cls, cluster: ClusterConfig) -> Needs:
        return cls(cpus=cluster.workers * cluster.cpus_per_worker + 1, gpus=cluster.workers * cluster.gpus_per_worker, spread=True)

    @classmethod
    def computing(cls, cluster: ClusterConfig, *, here: bool = False) -> Needs:
        return cls(cpus=1, gpus=1, here=here) if cluster.gpus_per_worker else cls(cpus=threads(), here=here)

    @classmethod
    def timed(cls) -> Needs:
        return cls(here=True, alone=True)


@dataclass(frozen=True)
class Room:
    """What a cluster holds, or has left."""

    cpus: float
    gpus: float
    machines: tuple[tuple[float, float], ...] = ()  # CPUs and GPUs of each as a whole; empty: it is one machine

    def holds(self, needs: Needs) -> bool:
        """Whether there is as much; for what is not spread, on some machine that has as much: Ray would wait for one for ever."""
        on_one = needs.spread or not self.machines or any(needs.cpus <= cpus and needs.gpus <= gpus for cpus, gpus in self.machines)
        return on_one and needs.cpus <= self.cpus and needs.gpus <= self.gpus

    def less(self, taken: Iterable[Needs]) -> Room:
        taken = list(taken)
        return replace(self, cpus=self.cpus - sum(n.cpus for n in taken), gpus=self.gpus - sum(n.gpus for n in taken))


def threads() -> int:
    """That torch uses in this process."""
    return int(os.environ.get("OMP_NUM_THREADS") or cores())


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def as_ray_work(cluster: ClusterConfig, to_run: Iterable[Needs]) -> bool:
    """Whether stages are given to Ray, rather than run one after another in this process.

    On an existing cluster always: this process may be on a machine that computes nothing. On a local one where some stage starts a Ray anyway
    and a second one fits beside the widest: by the real cores, as a local Ray is told of more CPUs than there are; by those it is told of
    where parallel_stages is set.
    """
    elsewhere = [needs for needs in to_run if not needs.here]
    if cluster.address is not None:
        return bool(elsewhere)
    if cluster.parallel_stages == 1 or len(elsewhere) < 2:
        return False
    if cluster.parallel_stages is not None:
        return True
    started_anyway = any(needs.spread for needs in elsewhere)
    return started_anyway and min(cluster.num_cpus, cores()) >= max(needs.cpus for needs in elsewhere) + 1
