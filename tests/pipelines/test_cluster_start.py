"""What is said before the first stage."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.graph import cluster_start
from pipelines.graph.cluster_start import check_before_the_first_stage
from pipelines.graph.room import Needs
from tasks.machine import multiplies_bfloat16
from tests.pipelines.configs import built

ASKED = ("distill.compute_dtype=bfloat16", "model.pretrain.compute_dtype=bfloat16")


def check(*overrides: str, cached: bool = False) -> None:
    check_before_the_first_stage(built(*overrides), [SimpleNamespace(stage=SimpleNamespace(id="base", needs=Needs()), cached=cached)])


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, cluster_start.log.name)
    return caplog


def test_bfloat16_on_a_processor_without_it_is_slow_and_said(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture):
    monkeypatch.setattr(cluster_start, "multiplies_bfloat16", lambda: False)
    check(*ASKED)
    assert said.messages[0].startswith("model.pretrain.compute_dtype, distill.compute_dtype: this processor has no instructions for bfloat16")


@pytest.mark.parametrize(
    ("overrides", "cached", "able"),
    [
        (ASKED, False, True),
        (ASKED, False, None),
        (ASKED, True, False),
        ((), False, False),
        ((*ASKED, "cluster.address=head:6379"), False, False),
        (("model.path=hub/model", "data.source=human_eval", ASKED[1]), False, False),
    ],
    ids=["it can", "not known", "nothing to run", "not asked", "another cluster", "nothing to pretrain"],
)
def test_and_else_nothing_is_said(monkeypatch, said: pytest.LogCaptureFixture, overrides: tuple[str, ...], cached: bool, able: bool | None):
    monkeypatch.setattr(cluster_start, "multiplies_bfloat16", lambda: able)
    monkeypatch.setattr(cluster_start, "as_ray_work", lambda *asked: False)  # no cluster to ask
    check(*overrides, cached=cached)
    assert not said.messages


@pytest.mark.parametrize(
    ("policy", "alone", "gpus", "warned"),
    [
        ("PASSIVE", True, 0, True),
        ("passive", True, 0, True),
        ("ACTIVE", True, 0, False),
        (None, True, 0, False),
        ("PASSIVE", False, 0, False),
        ("PASSIVE", True, 1, False),
    ],
)
def test_timing_with_threads_that_sleep_is_said(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, policy: str | None, alone: bool, gpus: int, warned: bool
):
    monkeypatch.setattr(cluster_start, "as_ray_work", lambda *asked: False)
    if policy is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    stage = SimpleNamespace(id="base/speed", needs=Needs(alone=alone))
    check_before_the_first_stage(built(f"cluster.gpus_per_worker={gpus}"), [SimpleNamespace(stage=stage, cached=False)])
    assert ["base/speed: timed while OMP_WAIT_POLICY=PASSIVE" in message for message in said.messages] == [True] * warned


@pytest.mark.parametrize(
    ("text", "able"),
    [
        ("model name : x\nflags\t\t: fpu avx2 amx_bf16 amx_tile\n", True),
        ("flags : fpu avx512_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("", None),
    ],
)
def test_what_the_system_tells_of_the_processor(tmp_path: Path, text: str, able: bool | None):
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is able
    assert multiplies_bfloat16(tmp_path / "none") is None
