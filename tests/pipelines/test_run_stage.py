"""One stage alone, from a checkout that cannot be written to and a folder that has nothing to do with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("conf", "dashboards", "jacobi_core", "pipelines", "tasks")
SETTINGS = ["experiment=smoke", "data.train=8", "data.test=4", "data.validation=0"]
HIDDEN = "mount --bind {0} {0} && mount -o remount,ro,bind {0} && "  # in a mount namespace of its own: root may write anywhere else


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"pipelines.{module}", *arguments]


def call(folder: Path, *arguments: str, module: str = "run_stage", prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([*prefix, *command(module, *arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def can_mount() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    """A working directory in which `prompts` has run alone."""
    folder = tmp_path_factory.mktemp("elsewhere")
    done = call(folder, "prompts", *SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/1] prompts: done" in done.stdout
    return folder


def test_it_writes_where_the_caller_is_and_finds_its_own_result(elsewhere: Path):
    assert {path.name for path in elsewhere.iterdir()} == {"outputs"}
    table = call(elsewhere, *SETTINGS, "dry_run=true", module="full_run").stdout
    assert re.search(r"^prompts +cached", table, re.M)


def test_inputs_that_are_not_there_are_named_with_the_commands_that_make_them(elsewhere: Path):
    done = call(elsewhere, "base/evaluate", *SETTINGS, "force=[base/evaluate]")
    assert done.returncode == 2
    settings = " ".join(f"'{text}'" if "[" in text else text for text in SETTINGS)
    both = " && ".join(
        f"python -m pipelines.full_run {settings} until={stage}" for stage in ("base/answers", "base/speed")
    )  # base is made on the way
    assert (
        done.stderr
        == f"error: run_stage base/evaluate: its input base, base/answers, base/speed is not finished in paths.store; make it with: {both}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["prompt", *SETTINGS], "run_stage: no stage 'prompt' in this run; nearest: prompts"),
        (["round1/pack", *SETTINGS, "force=[prompts]"], "force: run_stage runs round1/pack and no other stage, not prompts; recompute that first"),
        (SETTINGS, "the first argument is the stage to run, got 'experiment=smoke'"),
    ],
)
def test_a_stage_that_is_none_is_refused_in_one_line(tmp_path: Path, arguments: list[str], told: str):
    done = call(tmp_path, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount")
@pytest.mark.parametrize("arguments", [("run_stage", "prompts"), ("full_run", "until=prompts")])
def test_a_checkout_that_cannot_be_written_to_is_enough(tmp_path: Path, arguments: tuple[str, ...]):
    checkout, folder = tmp_path / "checkout", tmp_path / "somewhere"
    folder.mkdir()
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    module, *rest = arguments
    script = f'{HIDDEN.format(checkout)} ! touch {checkout}/x 2>/dev/null && exec env PYTHONPATH={checkout} "$@"'
    done = call(folder, *rest, *SETTINGS, module=module, prefix=("unshare", "-m", "sh", "-c", script, "sh"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/1] prompts: done" in done.stdout
    assert not list(checkout.rglob("__pycache__"))
    assert {path.name for path in folder.iterdir()} == {"outputs"}
