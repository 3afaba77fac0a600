"""Real Ray clusters of several machines, as far as one machine can hold them: every node has its own processes, and its own disk where a test
gives it one. A job sent with its working directory, a driver that is not on the head, and nodes that are not as they must be.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).with_name("ray")
APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]  # no process of another node is seen
SMALL = ["experiment=smoke", "data.train=32", "model.pretrain.steps=3", "trajectories.prompts=16", "rounds=[{block_size: 16, window: 1}]"]
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}


def can_part() -> bool:
    return sys.platform == "linux" and subprocess.run([*APART, "true"], capture_output=True).returncode == 0 if shutil.which("unshare") else False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_part() or not RAY.exists(), reason="needs root (unshare) and ray[default]"),
]


class Node:
    """One machine of a cluster. It ends with all its processes."""

    def __init__(self, arguments: str, log: Path, *, first: str = "true", then: str = "sleep infinity", **environment: str) -> None:
        """first, then: shell commands before and after Ray is started there."""
        own = "--min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0 --disable-usage-stats --object-store-memory=100000000"
        script = f"{first} && {RAY} start {arguments} {own} && {then}"
        self.log = log
        env = {**ENVIRONMENT, **environment}
        with log.open("w") as stream:
            self.process = subprocess.Popen([*APART, "sh", "-c", script], stdout=stream, stderr=subprocess.STDOUT, env=env, cwd=log.parent)

    def wait_for(self, text: str, seconds: float = 300) -> str:
        end = time.monotonic() + seconds
        while text not in (said := self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < end, said[-3000:]
            time.sleep(0.2)
        return said

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Cluster:
    """A head of 4 CPUs whose jobs API is open; other nodes join by a test's own wish."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.jobs = free_port(), free_port()
        arguments = f"--head --port={self.port} --num-cpus=4 --dashboard-port={self.jobs} --temp-dir={folder} --ray-client-server-port={free_port()}"
        self.head = Node(arguments, folder / "head.log")
        self.head.wait_for("Ray runtime started")
        self.address = f"{socket.gethostbyname(socket.gethostname())}:{self.port}"

    def submit(self, folder: Path, *overrides: str) -> subprocess.CompletedProcess:
        entry = f"ls -a && {sys.executable} -m pipelines.full_run {' '.join(map(repr, overrides))}"
        command = [RAY, "job", "submit", "--address", f"http://127.0.0.1:{self.jobs}", "--working-dir", ROOT, "--", "sh", "-c", entry]
        return subprocess.run(list(map(str, command)), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=800)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="jf-ray-", dir="/tmp"))  # Ray's sockets lie below it, and their names may not be long
    made = Cluster(folder)
    yield made
    made.head.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk that all nodes see."""
    return tmp_path_factory.mktemp("shared")


def test_a_job_sent_with_its_working_directory(cluster: Cluster, shared: Path):
    places = [f"paths.outputs={shared}/out", f"paths.store={shared}/store"]
    done = cluster.submit(shared, *SMALL, *places, "until=round1/pack")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert "joining the Ray cluster of RAY_ADDRESS" in said
    assert "cluster: 1 nodes checked" in said and "round1/pack: done" in said
    listed = said[: said.index("stage ")].split()
    assert "pipelines" in listed and "conf" in listed
    assert not {".venv", ".git", "outputs"} & set(listed)  # not sent
    assert len(list((shared / "store").glob("pack-*/manifest.json"))) == 1


def test_a_job_must_not_write_into_the_copy_of_its_working_directory(cluster: Cluster, shared: Path):
    done = cluster.submit(shared, *SMALL, "dry_run=true")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    for setting in ("paths.outputs=outputs", "paths.store=outputs/store"):
        assert f"error: {setting}: a job's working directory is a copy that Ray deletes" in said


def test_a_driver_that_is_not_on_the_head(cluster: Cluster, shared: Path, tmp_path: Path):
    """The head's processes cannot be seen from there: it is another machine, which is a node itself. Its environment alone names the cluster."""
    overrides = [*SMALL, f"paths.outputs={shared}/out", f"paths.store={shared}/store", "until=round1/pack", "trajectories.max_new_tokens=39"]
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"""
import sys
from pipelines import full_run
sys.argv = ["full_run", *{overrides!r}]
assert full_run.main() == 0
import ray
head = next(n["NodeID"] for n in ray.nodes() if "node:__internal_head__" in n["Resources"])
print("off the head:", ray.get_runtime_context().get_node_id() != head)
"""
    )
    node = Node(f"--address={cluster.address} --num-cpus=2", tmp_path / "node.log", then=f"{sys.executable} {driver}", RAY_ADDRESS=cluster.address)
    try:
        node.process.wait(800)
        said = node.log.read_text()
        assert "off the head: True" in said, said[-4000:]
        assert "cluster: 2 nodes checked" in said and "round1/pack: done" in said
    finally:
        node.stop()


def test_every_difference_of_a_node_is_told_before_the_first_stage(cluster: Cluster, tmp_path: Path):
    store, other = tmp_path / "store", tmp_path / "packages"
    store.mkdir()
    (other / "torch-1.2.3.dist-info").mkdir(parents=True)
    (other / "torch-1.2.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    (other / "tasks").mkdir()
    (other / "tasks" / "__init__.py").write_text("'''Of another commit.'''")
    node = Node(
        f"--address={cluster.address} --num-cpus=2",
        tmp_path / "node.log",
        first=f"mount -t tmpfs none {store}",
        PYTHONPATH=f"{other}:{ROOT}",
        RAY_ADDRESS="",
    )
    try:
        node.wait_for("Ray runtime started")
        command = [sys.executable, "-m", "pipelines.full_run", *SMALL, f"cluster.address={cluster.address}"]
        command += [f"paths.outputs={tmp_path}/out", f"paths.store={store}", "until=round1/pack"]
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
        assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
        told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        versions = r"error: cluster: node \S+ \(\S+, \w{8}\): other versions than here: torch 1\.2\.3 \(here 2\S+\); install"
        assert any(re.match(versions, line) for line in told), done.stderr[-3000:]
        assert any("tasks" in line and "is another version of the source; start with `ray job submit" in line for line in told)
        assert any(line.startswith(f"error: paths.store={store}: not shared with node ") and "put paths.store on a disk" in line for line in told)
        assert ": running" not in done.stdout  # not one stage was begun
        assert not list(store.glob(".probe-*"))
    finally:
        node.stop()
