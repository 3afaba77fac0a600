"""Stages side by side on a real Ray: the same files as one after another, and an end on request."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipelines.store import MANIFEST
from pipelines.tracking import mlflow_runs
from pipelines.tracking.tracker import sqlite_uri

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).parents[2]
SMALL = [
    "experiment=smoke",
    "rounds=[{block_size: 16, window: 2}]",
    "baselines=[cllm]",
    "data.train=32",
    "model.pretrain.steps=8",
    "distill.max_steps=4",
    "distill.probe.every=0",
    "evaluate.speed_prompts=1",
    "evaluate.accuracy_prompts=4",
    "evaluate.block_sizes=[8]",
    "evaluate.batch_sizes=[1]",
    "trajectories.shard_size=8",
]
PARALLEL = ["cluster.num_cpus=12", "cluster.parallel_stages=4"]
TIMED = {"seconds", "seconds_start_up", "seconds_ours"}


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    folder.mkdir()
    log = (folder / "log").open("w")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.full_run", *SMALL, *overrides], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
    )


def ended(process: subprocess.Popen[str], folder: Path) -> str:
    code = process.wait(800)
    printed = (folder / "log").read_text()
    assert code == 0, printed[-4000:]
    return printed


def outputs(folder: Path) -> dict[str, dict[str, str]]:
    """Hashes of all that no clock has a part in, by stage folder."""
    kinds = ("prompts", "base", "answers", "trajectories", "pack", "export")
    found = {}
    for path in folder.glob(f"outputs/store/*/{MANIFEST}"):
        manifest = json.loads(path.read_text())
        if manifest["kind"] in kinds:
            found[path.parent.name] = manifest["hashes"]
    return found


def test_side_by_side_gives_the_files_of_one_after_another(tmp_path: Path):
    alone = ended(start(tmp_path / "alone"), tmp_path / "alone")
    many = ended(start(tmp_path / "many", *PARALLEL), tmp_path / "many")
    assert len(outputs(tmp_path / "alone")) == 10  # prompts, base, trajectories; two of pack and export; three of answers
    assert outputs(tmp_path / "many") == outputs(tmp_path / "alone")
    lines = re.findall(r"\[\d+/20\] (\S+): (running|done)", many)
    began = {stage: position for position, (stage, state) in enumerate(lines) if state == "running"}
    finished = {stage: position for position, (stage, state) in enumerate(lines) if state == "done"}
    assert began.keys() == finished.keys() and len(began) == 20
    assert began["round1/trajectories"] < finished["base/answers"]
    assert began["cllm/pack"] < finished["round1/pack"] and began["round1/pack"] < finished["cllm/pack"]
    assert began["cllm/distill"] < finished["round1/distill"]  # their tokens are known as soon as they are packed
    for speed in (stage for stage in began if stage.endswith("/speed")):
        assert finished[speed] == began[speed] + 1, f"something began or ended while {speed} was timed"
    assert re.search(r"\[8/20\] round1/distill: distill: \d+ steps", many)  # what a worker says keeps its stage's label
    assert "running" in alone and "start-up" in alone


def test_sigterm_stops_all_stages_politely_and_leaves_nothing_behind(tmp_path: Path):
    folder = tmp_path / "stopped"
    process = start(folder, *PARALLEL, "until=round1/distill", "distill.max_steps=5000", "distill.epochs=5000")
    deadline = time.monotonic() + 400
    while "distill: step" not in (folder / "log").read_text():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 143, (folder / "log").read_text()[-3000:]
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    client = mlflow_runs.connect(sqlite_uri(folder / "outputs"))
    runs = client.search_runs([client.get_experiment_by_name("jacobi-forcing").experiment_id])
    states = {run.data.tags.get("stage", "pipeline"): run.info.status for run in runs}
    assert states["round1/distill"] == states["pipeline"] == "KILLED"
    assert "RUNNING" not in states.values()
    assert list(folder.glob("outputs/store/distill-*/ray/train/checkpoint_*"))  # the state to go on from


SLOW_STAGE = """
import logging, time

def run(config, inputs, output, context):
    logging.getLogger("slow").info("at work")
    try:
        for _ in range(6000):
            time.sleep(0.1)
    except KeyboardInterrupt:
        (output / "asked").write_text("")
        raise
"""
TWO = """
import logging, sys
from dataclasses import dataclass
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from pipelines.graph.dag import Graph, Stage, plan
from pipelines.graph.execute import execute
from pipelines.store import Store
from pipelines.tracking.tracker import Tracker, sqlite_uri
from tasks.stage import ClusterConfig

@dataclass
class Config:
    number: int

root = Path.cwd()
store = Store(root / "store")
graph = Graph([Stage(f"s{i}", "s", 1, "slow_stage:run", Config(i), resumable=True) for i in range(2)])
with Tracker.start(tracking_uri=sqlite_uri(root), run_name="pipeline", config={}, backlog=root / "backlog") as tracker:
    execute(plan(graph, store), store, tracker, ClusterConfig(num_cpus=4, parallel_stages=2))
"""


def test_sigterm_reaches_stages_wherever_they_run(tmp_path: Path):
    """Ray's own handler aborts the process that it is sent to."""
    (tmp_path / "slow_stage.py").write_text(SLOW_STAGE)
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    with log.open("w") as written:
        process = subprocess.Popen([sys.executable, "-c", TWO], cwd=tmp_path, env=environment, stdout=written, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 300
    while log.read_text().count("at work") < 2:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, log.read_text()
    assert len(list(tmp_path.glob("store/*/asked"))) == 2
    client = mlflow_runs.connect(sqlite_uri(tmp_path))
    experiments = [item.experiment_id for item in client.search_experiments()]
    assert [run.info.status for run in client.search_runs(experiments)] == ["KILLED"] * 3
