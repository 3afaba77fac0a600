"""What Ray Train (2.60) leaves running on a cluster when a driver is killed in the seconds in which its training starts, ended by the next training.

Two of Ray's own actors can outlive their driver there, until the cluster ends: a detached `PlacementGroupCleaner` whose controller died before it
told it what to watch, and a `TrainController` that is dead to the cluster and whose process hangs in its exit.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

log = logging.getLogger(__name__)
CONTROLLER, CLEANER = "TrainController", "PlacementGroupCleaner"
SECONDS = 30  # for the nodes to answer: a training never waits longer for what others have left
MOST = 10_000  # actors that a cluster tells of


def end_left_behind() -> None:
    """End those of trainings that are over, whoever's they were; touches nothing of a living one. Needs a started Ray; never raises.

    Asks Ray's dashboard, as Ray Train's own cleaner does: a cluster without one keeps what was left.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from ray.util.state import list_actors

    try:
        here = ray.get_runtime_context().gcs_address  # without it another Ray of this machine may be asked
        actors = [
            vars(actor)
            for name in (CONTROLLER, CLEANER)
            for actor in list_actors(here, filters=[("class_name", "=", name)], limit=MOST, timeout=SECONDS, raise_on_missing_output=False)
        ]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        ender = ray.remote(num_cpus=0, max_retries=0)(_end)
        asked = [
            ender.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(processes)
            for node, processes in over(actors).items()
            if node in alive
        ]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=SECONDS) if asked else ([], [])
        ended = sum(ray.get(done))
    except Exception as error:  # of the cluster's: nothing that this training needs
        log.debug("what other trainings have left is not known: %s", error)
        return
    if ended:
        log.warning("distill: ended %d processes that Ray Train had left of trainings whose drivers were killed", ended)


def over(actors: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, str]]:
    """Of the actors of a cluster (class_name, state, job_id, node_id, pid): node -> pid -> class of those whose training is over.

    A dead actor's process has most often ended too. A cleaner is over when no controller of its job is left; the processes of living actors are
    never among them, whatever dead one had their number before.
    """
    listed = [actor for actor in actors if actor["pid"] and actor["node_id"]]
    training = {actor["job_id"] for actor in listed if actor["class_name"] == CONTROLLER and actor["state"] != "DEAD"}
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for living in (False, True):
        for actor in listed:
            if (actor["state"] != "DEAD") is living:
                found[actor["node_id"]].pop(actor["pid"], None)
                if not living or (actor["class_name"] == CLEANER and actor["job_id"] not in training):
                    found[actor["node_id"]][actor["pid"]] = actor["class_name"]
    return {node: processes for node, processes in found.items() if processes}


def _end(processes: Mapping[int, str]) -> int:
    """On their node: SIGKILL to those that still are what they were. Returns how many."""
    import psutil

    ended = 0
    for pid, name in processes.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).startswith(f"ray::{name}"):  # the title that Ray gives to an actor's process
                process.kill()
                ended += 1
    return ended
