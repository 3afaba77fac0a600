"""The stage through Ray Train: whatever is killed, the same command ends with the weights of an undisturbed run. Slow: Ray starts four times."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from jacobi_core.hub import load_model
from tasks import artifacts
from tests.core.tiny import tiny_model
from tests.tasks.distill_driver import STEPS, settings
from tests.tasks.tiny_training import make_trainer, reproducible, silent, write_rows

ROOT = Path(__file__).parents[2]
PATIENCE = 400.0  # seconds for anything Ray does

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "packed").mkdir()
    write_rows(tmp_path / "packed" / "packed.parquet", rows=16)
    tiny_model(seed=1).save_pretrained(tmp_path / "base")
    return tmp_path


def steps(folder: Path) -> list[int]:
    """Every step that rank 0 has finished, in all attempts."""
    file = folder / "steps.txt"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def drive(folder: Path, *, workers: int, kill_at: int = 0, until: Callable[[], bool] | None = None, send: int | None = None) -> tuple[int, str]:
    """Exit code and output of a driver; `send` is sent to it as soon as `until` holds."""
    log = folder / f"driver{len(list(folder.glob('driver*')))}.log"
    code = "import sys; from tests.tasks.distill_driver import main; sys.exit(main())"
    with log.open("w") as out:
        driver = subprocess.Popen([sys.executable, "-c", code, str(folder), str(workers), str(kill_at)], cwd=ROOT, stdout=out, stderr=out)
    try:
        if until is not None:
            deadline = time.monotonic() + PATIENCE
            while not until():
                assert driver.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            workers_of_ray = [p for p in psutil.Process(driver.pid).children(recursive=True) if "Train" in p.name()]
            assert workers_of_ray
            driver.send_signal(send)
            if send == signal.SIGKILL:  # its Ray ends a moment later, and until then goes on training
                assert not psutil.wait_procs(workers_of_ray, timeout=60)[1]
        return driver.wait(timeout=PATIENCE), log.read_text()
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait()


def test_killed_workers_a_killed_driver_and_a_stopped_one_leave_no_trace(folder):
    out = folder / "out"

    # 1. two workers; rank 0 is killed at step 11 and both go on by themselves from step 8, or 4 if its report was still on its way;
    #    then the driver is killed
    code, _ = drive(folder, workers=2, kill_at=11, until=lambda: steps(folder).count(11) == 2 and steps(folder)[-1] >= 15, send=signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert (folder / "killed").exists()
    seen = steps(folder)
    assert (seen.count(1), seen.count(10)) == (1, 2)
    first = len(seen)

    # 2. the same command, now with one worker: goes on from a checkpoint; SIGTERM saves at a step where none is due
    code, printed = drive(folder, workers=1, until=lambda: len(steps(folder)) > first + 2 and steps(folder)[-1] % 4 == 1, send=signal.SIGTERM)
    assert code == 143, printed
    assert "saving a checkpoint before the end" in printed
    assert steps(folder)[first] in range(9, max(seen) + 2, 4), steps(folder)  # after the last checkpoint, or the one before it
    last = steps(folder)[-1]
    assert last < STEPS
    assert not (out / "stop").exists()
    assert not (out / "training.json").exists()

    # 3. once more: not a step twice
    code, printed = drive(folder, workers=1)
    assert code == 0, printed
    assert steps(folder)[-(STEPS - last) :] == list(range(last + 1, STEPS + 1))
    assert sorted(path.name for path in out.iterdir()) == ["training.json", "weights"]

    alone = make_trainer(folder / "packed" / "packed.parquet", settings())
    alone.run(log=silent, save=silent)
    training = artifacts.read_json(out / "training.json")
    assert training["selected_step"] == training["steps"] == STEPS
    for mine, theirs in zip(reproducible(alone.curves.points), reproducible(training["curves"]), strict=True):
        assert theirs == pytest.approx(mine, rel=1e-6)
    trained = load_model(out / "weights", dtype="float64").state_dict()
    for name, weight in alone.loss.model.named_parameters():
        torch.testing.assert_close(trained[name], weight.detach(), rtol=1e-6, atol=1e-8)


def test_a_mistake_that_a_worker_finds_reaches_the_user_as_one_line(folder):
    tiny_model(seed=1, vocab_size=20).save_pretrained(folder / "base")
    code, printed = drive(folder, workers=2)
    assert code == 2, printed
    (line,) = (line for line in printed.splitlines() if line.startswith("refused: "))
    assert "packed.parquet: holds token" in line
    assert "the model's vocabulary has 20" in line
    assert not (folder / "out" / "refused.txt").exists()


def test_another_ray_of_the_machine_does_not_end_a_training(folder, monkeypatch):
    """Ray Train's watchdog would ask that one about our controller, and take its ignorance for a death."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    other = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True, "object_store_memory": 100_000_000})
    try:
        code, printed = drive(folder, workers=1)
    finally:
        other.shutdown()
    assert code == 0, printed
    assert steps(folder) == list(range(1, STEPS + 1)), printed
    assert "is dead" not in printed
