"""What a fault drill breaks: three Ray nodes, a tracking server, a small disk, and the pipeline's driver; started, broken and counted here.

Everything of one round carries a marker in its environment, so that what outlives the round can be found. Needs Linux; the small disk
(a tmpfs) needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster

from benchmarks.trajectory_faults import title

MARKER = "JACOBI_FAULT_ROUND"
# Actors of Ray's own, detached, by a name that a cluster has once (get_if_exists): the first driver starts them, every later one finds them
ONE_PER_CLUSTER = ("_StatsActor", "ActorLocationTracker", "_AutoscalingCoordinatorActor")
DISK_MB = 64
ROOT = Path(__file__).resolve().parents[1]
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class Nodes:
    """A head and two more nodes of two logical CPUs each, on this machine."""

    def __init__(self) -> None:
        # with the dashboard, as `ray start --head` has it: Ray Train's PlacementGroupCleaner asks it whether a training still has its controller,
        # and without an answer outlives every driver that is killed while it trains
        self._cluster = Cluster(initialize_head=True, head_node_args=self._node() | {"include_dashboard": True})
        self._others = [self._cluster.add_node(**self._node()) for _ in range(2)]
        self.address: str = self._cluster.address

    def kill_one(self, rng: random.Random) -> None:
        """SIGKILL to all processes of a node that is not the head."""
        self._cluster.remove_node(self._others.pop(rng.randrange(len(self._others))), allow_graceful=False)

    def add_one(self) -> None:
        self._others.append(self._cluster.add_node(**self._node()))

    def stop(self) -> None:
        self._cluster.shutdown()

    @staticmethod
    def _node() -> dict[str, int]:
        return {"num_cpus": 2, "object_store_memory": 100_000_000}


class TrackingServer:
    """`mlflow server` on sqlite, on loopback; its port stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        database, artifacts = f"sqlite:///{self._folder / 'mlflow.db'}", self._folder / "artifacts"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        command += ["--backend-store-uri", database, "--artifacts-destination", str(artifacts)]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        while wait and not self._answers():
            if self._process.poll() is not None:
                raise SystemExit(f"the tracking server ended by itself: see {self._folder / 'mlflow.log'}")
            time.sleep(0.5)

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return True
        except OSError:
            return False


class SmallDisk:
    """A tmpfs that can be filled to the last byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"no small disk ({done.stderr.strip()}): mounting a tmpfs needs root; without it: --faults worker,node,driver,tracking")

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(1 << 16)):
                pass

    def empty(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def remove(self) -> None:
        unmount(self.folder)


def unmount(folder: Path) -> None:
    """Also what a drill has left that was killed itself."""
    while folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Driver:
    """`python -m pipelines.full_run` in a process of its own."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = psutil.Popen(
                command, stdout=out, stderr=out, cwd=log.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True
            )

    def code(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        """SIGKILL to the driver alone, not to what it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait()

    def last_words(self) -> str:
        """The error it ended with, else the last line of its log."""
        lines = self.log.read_text(errors="replace").splitlines() or [""]
        return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])[:300]


def sorted_out(titles: Iterable[str]) -> tuple[list[str], list[str]]:
    """Of the titles of processes that hold actors when their driver is gone: orphans, and what of Ray's own a cluster keeps one of.

    A second one of those is an orphan: their number must not grow with the drivers that were killed.
    """
    orphans, kept = [], []
    for text in titles:
        actor = text.strip().removeprefix("ray::").partition(".")[0].partition("(")[0]  # "ray::NAME.METHOD" while it is at work
        if actor in ONE_PER_CLUSTER and actor not in kept:
            kept.append(actor)
        else:
            orphans.append(text.strip())
    return orphans, kept


def workers(mark: str) -> list[psutil.Process]:
    """Processes of Ray that hold a task or an actor of the round."""
    return [process for process in of_round(mark) if title(process).startswith("ray::") and not title(process).startswith("ray::IDLE")]


def of_round(mark: str) -> Iterator[psutil.Process]:
    """Living processes that inherited the round's marker, this one left out."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARKER) == mark:
                yield process
