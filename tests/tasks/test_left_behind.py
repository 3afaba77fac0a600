"""What Ray Train leaves of killed drivers is ended by the next training, and nothing else is: on a real cluster, and by rule."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.distill.left_behind import CLEANER, CONTROLLER, _end, end_left_behind, over

actors = st.lists(
    st.fixed_dictionaries(
        {
            "class_name": st.sampled_from([CONTROLLER, CLEANER]),
            "state": st.sampled_from(["ALIVE", "DEAD", "PENDING_CREATION"]),
            "job_id": st.sampled_from(["01", "02"]),
            "node_id": st.sampled_from(["a", "b", None]),
            "pid": st.integers(0, 3),
        }
    ),
    max_size=8,
)


@given(actors)
def test_no_process_of_a_living_training_is_ever_over(listed):
    found = over(listed)
    living = [actor for actor in listed if actor["state"] != "DEAD"]
    training = {actor["job_id"] for actor in living if actor["class_name"] == CONTROLLER and actor["pid"] and actor["node_id"]}
    for actor in living:
        if actor["class_name"] == CONTROLLER or actor["job_id"] in training:
            named = found.get(actor["node_id"], {}).get(actor["pid"])
            # a number is one living process's: of two living actors that claim it, the listing is wrong, not we
            assert named is None or sum((a["node_id"], a["pid"]) == (actor["node_id"], actor["pid"]) for a in living) > 1
    assert 0 not in {pid for processes in found.values() for pid in processes}


def test_what_is_over():
    def actor(name: str, state: str, job: str, pid: int) -> dict[str, object]:
        return {"class_name": name, "state": state, "job_id": job, "node_id": "n", "pid": pid}

    listed = [
        actor(CONTROLLER, "DEAD", "01", 10),  # may hang in its exit
        actor(CLEANER, "ALIVE", "01", 11),  # was never told what to watch
        actor(CONTROLLER, "ALIVE", "02", 20),
        actor(CLEANER, "ALIVE", "02", 21),
        actor(CONTROLLER, "DEAD", "03", 20),  # its number is the living one's now
    ]
    assert over(listed) == {"n": {10: CONTROLLER, 11: CLEANER}}


def titled(title: str) -> psutil.Popen:
    """A process of that title, as Ray's workers have one."""
    process = psutil.Popen([title, "-c", "import time; time.sleep(600)"], executable=sys.executable)
    while title not in process.cmdline():  # until it has started
        time.sleep(0.01)
    return process


def test_only_processes_that_still_are_ray_trains_are_ended():
    hung, other = titled(f"ray::{CONTROLLER}.run"), titled("ray::Somebody.elses")
    try:
        gone = subprocess.Popen(["true"])
        gone.wait()
        assert _end({hung.pid: CONTROLLER, other.pid: CLEANER, gone.pid: CONTROLLER}) == 1
        assert hung.wait(timeout=10) and other.is_running()
    finally:
        for process in (hung, other):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            process.wait()


DRIVER = """
import os, sys, time
import ray

class PlacementGroupCleaner:  # as Ray Train's, never told to watch
    def pid(self):
        return os.getpid()

class TrainController(PlacementGroupCleaner):
    pass

ray.init(address=sys.argv[1])
cleaner = ray.remote(PlacementGroupCleaner).options(num_cpus=0, lifetime="detached").remote()
controller = ray.remote(TrainController).options(num_cpus=0).remote()
print("pids", *ray.get([cleaner.pid.remote(), controller.pid.remote()]), flush=True)
time.sleep(600)
"""


def started(address: str) -> tuple[subprocess.Popen, psutil.Process, psutil.Process]:
    """A driver, its cleaner and its controller."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True)
    line = next(line for line in driver.stdout if line.startswith("pids "))
    cleaner, controller = map(psutil.Process, map(int, line.split()[1:]))
    return driver, cleaner, controller


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_drivers_cleaner_is_ended_and_a_living_trainings_is_not(monkeypatch):
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": True, "object_store_memory": 100_000_000})
    drivers = []
    try:
        drivers = [started(cluster.address), started(cluster.address)]
        (killed, orphan, its_controller), (_, cleaner, controller) = drivers
        killed.kill()
        killed.wait()
        its_controller.wait(timeout=60)
        assert orphan.is_running()  # Ray leaves it
        ray.init(address=cluster.address)
        end_left_behind()
        orphan.wait(timeout=30)
        assert cleaner.is_running() and controller.is_running()
        end_left_behind()  # nothing is left to end
        assert cleaner.is_running() and controller.is_running()
    finally:
        ray.shutdown()
        for driver, *_ in drivers:
            driver.kill()
            driver.wait()
        cluster.shutdown()
