"""A noise schedule of one's own: found where the user is, tried before anything runs, and packed again when its source changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from pipelines.config.own_schedule import schedule_identity
from pipelines.stages import build_graph
from tasks.stage import UserError
from tests.pipelines.configs import built

RAMP = "def ramp(*, num_blocks, **_):\n    return [i / num_blocks for i in range(num_blocks)]\n"
HALF = "def ramp(*, num_blocks, **_):\n    return [0.5 for i in range(num_blocks)]\n"
SMALL = ["experiment=smoke", "baselines=[cllm]"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """source -> the user's module `own_schedule_here`, as a new process would import it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits within one second look alike to Python's cache

    def write_(source: str) -> None:
        (tmp_path / "own_schedule_here.py").write_text(source)
        monkeypatch.delitem(sys.modules, "own_schedule_here", raising=False)

    return write_


def stages(tmp_path: Path, *overrides: str) -> dict[str, tuple[str, dict]]:
    """stage id -> (fingerprint, external inputs)."""
    graph = build_graph(built(*SMALL, *overrides), identity_cache=tmp_path)
    return {stage.id: (graph.fingerprints[stage.id], dict(stage.external)) for stage in graph.stages}


def changed(before: dict, after: dict) -> set[str]:
    return {stage for stage in before if before[stage][0] != after[stage][0]}


def test_built_in_schedules_have_no_external_input(tmp_path):
    for kind in ("linear", "random", "reverse", "cllm"):
        assert schedule_identity(NoiseSchedule(kind=kind), 4) == {}
        assert stages(tmp_path, f"noise_schedule={kind}")["round1/pack"][1] == {}


def test_the_baseline_is_the_cllm_schedule_whatever_the_rounds_use(tmp_path, write):
    write(RAMP)
    packs = [stages(tmp_path, f"noise_schedule={kind}")["cllm/pack"] for kind in ("linear", "cllm", "own_schedule_here:ramp")]
    assert packs[0] == packs[1] == packs[2]
    chosen = stages(tmp_path, "noise_schedule=cllm", "rounds.0.t_max=0.5")
    assert chosen["round1/pack"] == chosen["cllm/pack"]  # choosing it sets its window and range


def test_an_edit_packs_again_and_touches_no_trajectory(tmp_path, write):
    override = "noise_schedule=own_schedule_here:ramp"
    write(RAMP)
    first = stages(tmp_path, override)
    assert first == stages(tmp_path, override)
    write(HALF)
    second = stages(tmp_path, override)
    assert first["round1/pack"][1] != second["round1/pack"][1]
    kept = {"prompts", "base", "base/answers", "base/speed", "base/evaluate", "round1/trajectories", "cllm/pack"}
    assert changed(first, second) == set(first) - kept


def test_trajectories_kept_for_one_schedule_depend_on_its_source(tmp_path, write):
    overrides = ["noise_schedule=own_schedule_here.ramp", "trajectories.collect=schedule", "baselines=[]"]
    write(RAMP)
    first = stages(tmp_path, *overrides)
    write(HALF)
    assert "round1/trajectories" in changed(first, stages(tmp_path, *overrides))


def test_the_name_of_what_runs_is_that_of_what_was_imported(tmp_path, write):
    write(RAMP)
    first = stages(tmp_path, "noise_schedule=own_schedule_here:ramp")
    (tmp_path / "own_schedule_here.py").write_text(HALF)  # edited while a sweep runs: the old code is still what computes
    assert not changed(first, stages(tmp_path, "noise_schedule=own_schedule_here:ramp"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def ramp(*, num_blocks, **_):\n    return [0.5]\n", "gave 1 noise ratios for 2 blocks"),
        ("def ramp(*, num_blocks, **_):\n    return [1.5] * num_blocks\n", "gave a noise ratio of 1.5, which must be from 0 to 1"),
        ("def ramp(num_blocks):\n    return [0.5] * num_blocks\n", "failed for {'num_blocks': 1, 'block_size': "),
        ("import functools\nramp = functools.partial(lambda *, num_blocks, **_: [0.5] * num_blocks)\n", "no source file"),
        ("ramp = 3\n", "is a int, not a function"),
        ("ramp = (\n", "cannot be imported (SyntaxError: "),
    ],
)
def test_what_is_wrong_with_it_is_known_before_anything_runs(tmp_path, write, source, says):
    write(source)
    with pytest.raises(UserError) as error:
        stages(tmp_path, "noise_schedule=own_schedule_here:ramp")
    assert str(error.value).startswith(f"noise_schedule=own_schedule_here:ramp: {says}") and "\n" not in str(error.value)
