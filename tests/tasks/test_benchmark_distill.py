"""The distillation benchmark's pieces run, at toy size: what it measures is not looked at, what it compares is the same work."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import distill, distill_cases
from jacobi_core.distillation.attention_variant import Backend
from jacobi_core.distillation.segments import SegmentPlan


def toy(*given: str, **changes):
    options = distill.arguments(list(given))
    vars(options).update({"size": "toy", "answer": 64, "blocks": [(4, 16)], "lengths": [256], "rows": 4, "head": (256, 1000)} | changes)
    return options


@pytest.fixture
def in_this_process(monkeypatch):
    """Children cost seconds each, for torch to be imported."""
    works = {"step": distill_cases.memory_of_step, "pack": distill_cases.memory_of_packing}

    def child(work, **settings):
        found = works[work](**json.loads(json.dumps(settings)))
        return found | {"mb": found["mb"] + 1}  # a process that has had larger peaks does not grow

    monkeypatch.setattr(distill, "child", child)


def test_every_name_of_the_docstring_is_printed(in_this_process, capsys):
    rows = distill.main(toy("--json", "--trajectories", "40"))
    assert json.loads(capsys.readouterr().out) == rows
    named = {r["name"] for r in rows}
    assert {"step_vs_plain_lm", "packed_vs_per_block", "memory_mb", "memory_ratio", "packing_rows_per_s", "packing_mb", "data_share"} <= named
    assert {"step_vs_plain_lm_dense", "dense_vs_sliced", "memory_mb_sliced_nc_ic_256", "memory_ratio_nc1_256", "head_mb"} <= named
    assert all(isinstance(r["value"], float) and r["model"] for r in rows)


def test_only_what_is_asked_for(in_this_process, capsys):
    distill.main(toy("--only", "packing", "--trajectories", "40"))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        "packing_rows_per_s",
        "packing_samples_per_s",
        "packing_mb",
        "packing_mb_growth",
    ]


def test_a_process_of_its_own():
    found = distill.child("step", length=256, mask="nc16", backend="dense", threads=1, size="toy")
    assert found["mb"] > 1 and found["seconds"] > 0


def test_no_gpu_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        distill.arguments(["--gpu"])
    assert "--gpu needs a CUDA device" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def gpu_stand_in(monkeypatch):
    """`sliced` in the place of a device's backends; which ones were built."""
    built, step = [], distill_cases.packed_step
    monkeypatch.setattr(distill, "flash_kernel", lambda: None)

    def packed_step(model, backend, *, window):
        built.append((backend.value, window))
        return step(model, Backend.sliced, window=window)

    monkeypatch.setattr(distill, "packed_step", packed_step)
    monkeypatch.setattr(distill, "gpu_peak", lambda model, step, batch: step(batch) and 100)
    turns = distill.turns
    monkeypatch.setattr(distill, "turns", lambda steps, models, batches: turns(steps, models, batches[:1], repeats=1))
    return built


def test_who_cannot_take_a_gpu_s_rows_is_left_out_and_the_others_come_out(gpu_stand_in, monkeypatch, capsys):
    refused = SegmentPlan.of
    monkeypatch.setattr(SegmentPlan, "of", lambda batch, variant, *, kernel: refused(batch, variant, kernel=kernel, copies=1.3))
    found = distill.gpu(toy(gpu_length=1024, gpu_device="cpu"))
    assert gpu_stand_in == [("flex", 16), ("flex", 64), ("flash", 64)]
    assert set(found) == {f"gpu_{what}_{name}" for what in ("step", "memory") for name in ("flex", "flex_w64", "flash_w64")}
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "flash: left out" in line]
    assert "keys per token" in said


def test_a_contestant_that_fails_on_the_device_is_left_out(gpu_stand_in, monkeypatch, capsys):
    stand_in = distill.packed_step

    def packed_step(model, backend, *, window):
        if backend is Backend.flex:
            raise torch.OutOfMemoryError("out of\nmemory")
        return stand_in(model, backend, window=window)

    monkeypatch.setattr(distill, "packed_step", packed_step)
    found = distill.gpu(toy(gpu_length=256, gpu_device="cpu"))
    assert {"gpu_step_flash", "gpu_step_flash_w64"} <= set(found) and "gpu_step_flex" not in found
    assert "flex: left out, out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("blocks, n", [(5, 8), (3, 16)])
def test_one_forward_per_block_is_the_same_loss(blocks, n):
    batch = distill_cases.row(1, answer=blocks * n - 3, window=1, block_size=n)
    packed, alone = distill_cases.llama("toy"), distill_cases.llama("toy")
    losses = [distill_cases.packed_step(packed, Backend.dense, window=1)(batch), distill_cases.per_block_step(alone)(batch)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for a, b in zip(packed.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6)


def test_a_row_has_the_length_that_is_asked_for():
    batch = distill_cases.row(0, answer=960)
    assert batch.input_ids.shape == (1, 2048)
    ratios = [float((batch.teacher[batch.block == i] >= 0).sum()) / 16 for i in range(16)]
    assert ratios[0] == 0 and max(ratios) > 0.7  # noise grows inside a window
