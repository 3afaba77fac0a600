"""Ranks as processes: their number changes nothing, a failing one takes all down, a stop is agreed upon. gloo, no Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from jacobi_core.hub import empty_model, load_model
from tasks.distill.config import DistillConfig, LoraSettings
from tasks.distill.stopping import StopFile
from tasks.distill.weights import gathered, load_into
from tasks.packed_files import PackedRows
from tests.core.tiny import tiny_model
from tests.tasks.tiny_training import changed, exit_codes, in_ranks, make_trainer, reproducible, silent, weights, write_rows

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the one-process part of a run


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("packed") / "packed.parquet", rows=16)


def train_and_gather(rank: int, workers: int, packed: Path, out: Path, runs: dict[str, tuple[DistillConfig, dict[str, Any]]]) -> None:
    for name, (config, model) in runs.items():
        trainer = make_trainer(packed, config, rank=rank, workers=workers, **model)
        trainer.run(log=silent, save=silent)
        state = gathered(trainer.loss, rank=rank)
        if rank == 0:
            torch.save({"curves": trainer.curves.points, "weights": state}, out / f"{name}-{workers}.pt")


def check_equal(curves: list[dict[str, float]], tensors: dict[str, torch.Tensor], alone, *, tolerance: float) -> None:
    """With what one process in one forward per step got, in fp64."""
    for mine, theirs in zip(reproducible(alone.curves.points), reproducible(curves), strict=True):
        assert theirs == pytest.approx(mine, rel=tolerance)
    for name, weight in ((name, p) for name, p in alone.loss.model.named_parameters() if p.requires_grad):
        torch.testing.assert_close(tensors[name], weight.detach(), rtol=tolerance, atol=tolerance)


def test_two_fsdp2_workers_train_and_export_what_one_process_does(packed, tmp_path):
    """8x1 = 2x(2x2) = 2x(4x1) = 2x(1x4), tied and not, over workers x (accumulation x rows per forward); 1x8 is in test_distill_loop.py."""
    runs = {
        "tied": (changed(), {"tied": True}),
        "untied": (changed(), {"tied": False}),
        "two": (changed(accumulation=2), {"tied": True}),
        "four": (changed(accumulation=4), {"tied": True}),
        "lora": (changed(lora=LoraSettings(rank=4)), {"tied": True}),
    }
    in_ranks(train_and_gather, packed, tmp_path, runs, workers=2)
    for name, (config, model) in runs.items():
        found = torch.load(tmp_path / f"{name}-2.pt", weights_only=True)
        alone = make_trainer(packed, changed(lora=config.lora), **model)
        alone.run(log=silent, save=silent)
        check_equal(found["curves"], found["weights"], alone, tolerance=1e-8)
    # a plain checkpoint: no tensor twice, and what from_pretrained reloads is bit-equal
    for tied, name in ((True, "tied"), (False, "untied")):
        exported = tiny_model(seed=9, tied=tied)  # other weights, all to be replaced
        load_into(exported, torch.load(tmp_path / f"{name}-2.pt", weights_only=True)["weights"])
        exported.save_pretrained(tmp_path / name)
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            assert len(file.keys()) == len(list(exported.named_parameters()))
        reloaded = load_model(tmp_path / name, dtype="float64")
        ids = torch.tensor([[5, 6, 7, 8]])
        assert torch.equal(reloaded(input_ids=ids).logits, exported(input_ids=ids).logits)
        assert empty_model(tmp_path / name).config.tie_word_embeddings is tied


def test_two_workers_multiply_in_bfloat16_as_one_does(packed, tmp_path):
    """Their forwards are the same, their sums of gradients are not: equal to float32's precision on the first step's norm."""
    config = changed(compute_dtype="bfloat16", dtype="float32", epochs=1)
    model = {"dtype": torch.float32}
    in_ranks(train_and_gather, packed, tmp_path, {"narrow": (config, model)}, workers=2)
    alone, wide = (make_trainer(packed, changed(dtype="float32", epochs=1, compute_dtype=t), **model) for t in ("bfloat16", None))
    for trainer in (alone, wide):
        trainer.run(log=silent, save=silent)
    first = torch.load(tmp_path / "narrow-2.pt", weights_only=True)["curves"][0]
    expected, other = alone.curves.points[0], wide.curves.points[0]
    for name in ("consistency", "ar"):
        assert first[name] == pytest.approx(expected[name], rel=1e-4)
        assert abs(first[name] - expected[name]) < 0.2 * abs(first[name] - other[name])
    assert first["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-2)


def train_a_part(rank: int, workers: int, packed: Path, folder: Path, start: int | None, stop: int, config: DistillConfig) -> None:
    trainer = make_trainer(packed, config, rank=rank, workers=workers, seed=1 if start is None else 9)
    if start is not None:
        trainer.resume(folder / str(start))
        assert trainer.step == start
    trainer.run(log=silent, save=lambda t: t.save(folder / str(t.step)), stop=lambda: trainer.step == stop)
    state = gathered(trainer.loss, rank=rank)
    if rank == 0:
        torch.save({"curves": trainer.curves.points, "weights": state}, folder / "end.pt")


def test_another_number_of_workers_goes_on_where_the_last_one_stopped(packed, tmp_path):
    """2 -> 1 -> 3 workers; the cuts are not where checkpoints or the points of the curves are due."""
    config = changed(batch_size=6, epochs=3, log_every=3, checkpoint_every=100)
    in_ranks(train_a_part, packed, tmp_path, None, 2, config, workers=2)
    train_a_part(0, 1, packed, tmp_path, 2, 5, config)
    in_ranks(train_a_part, packed, tmp_path, 5, 100, config, workers=3)
    alone = make_trainer(packed, config)
    alone.run(log=silent, save=silent)
    assert [point["step"] for point in alone.curves.points] == [3, 6, 8]
    end = torch.load(tmp_path / "end.pt", weights_only=True)
    check_equal(end["curves"], end["weights"], alone, tolerance=1e-7)  # eight steps at a high rate


def fail_on_rank_one(rank: int, workers: int, packed: Path, errors: Path) -> None:
    trainer = make_trainer(packed, rank=rank, workers=workers)
    step = trainer._train_step

    def failing_step(batches):
        if rank == 1 and trainer.step == 1:
            raise RuntimeError("the disk of rank 1 is gone")
        return step(batches)

    trainer._train_step = failing_step
    try:
        trainer.run(log=silent, save=silent)
    except BaseException as error:
        (errors / str(rank)).write_text(str(error))
        raise


def test_one_failing_rank_ends_all(packed, tmp_path):
    assert exit_codes(fail_on_rank_one, packed, tmp_path, workers=2) == [1, 1]
    assert (tmp_path / "1").read_text() == "the disk of rank 1 is gone"
    assert (tmp_path / "0").read_text()  # that its peer has left


def stop_at_step(rank: int, workers: int, packed: Path, folder: Path) -> None:
    """Only rank 0 sees the file, and only after its second step has begun."""
    path = folder / "stop" if rank == 0 else folder / "nothing"
    stop = StopFile(path, rank=rank, workers=workers)
    trainer = make_trainer(packed, changed(checkpoint_every=100), rank=rank, workers=workers)
    saved = []

    def log(point, step):
        if rank == 0 and step == 2:
            (folder / "stop").touch()

    trainer.run(log=log, save=lambda t: t.save(folder / "checkpoint") or saved.append(t.step), stop=stop)
    (folder / f"rank{rank}.json").write_text(json.dumps([trainer.step, saved, stop.seen, trainer.finished]))


def five_and_three(rank: int, workers: int, packed: Path, folder: Path) -> None:
    trainer = make_trainer(packed, changed(batch_size=2, epochs=1), rank=rank, workers=workers)
    trainer.run(log=silent, save=silent)
    (folder / f"steps{rank}.json").write_text(json.dumps([trainer.step, trainer.tokens]))


def stop_then_share(rank: int, workers: int, packed: Path, few: Path, folder: Path) -> None:
    stop_at_step(rank, workers, packed, folder)
    five_and_three(rank, workers, few, folder)


def test_ranks_stop_at_one_step_and_samples_that_share_badly_are_trained(packed, tmp_path):
    """5 and 3 samples in the rows of two workers: as many steps on both, by construction."""
    few = tmp_path / "few.parquet"
    write_uneven(few)
    in_ranks(stop_then_share, packed, few, tmp_path, workers=2)
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)] == [[2, [2], True, False]] * 2
    assert (tmp_path / "checkpoint" / "progress.json").exists()
    rows = PackedRows(few)
    assert [json.loads((tmp_path / f"steps{rank}.json").read_text()) for rank in (0, 1)] == [[1, int(rows.lengths.sum())]] * 2


def write_uneven(path: Path) -> None:
    """Two rows: one of 5 samples, one of 3."""
    from jacobi_core.distillation.noise_schedule import NoiseSchedule
    from jacobi_core.distillation.packing import join_samples
    from tasks.packed_files import write_packed

    single = write_rows(path.with_name("single.parquet"), rows=8)
    samples = PackedRows(single).read(range(8))
    joined = [join_samples(samples[:5]), join_samples(samples[5:])]
    write_packed(path, joined, schedule=NoiseSchedule(window=2), max_length=max(map(len, joined)))


def test_one_process_without_a_gpu_is_not_sharded(packed):
    trainer = make_trainer(packed)
    assert not any(hasattr(p, "full_tensor") for p in trainer.loss.parameters())
    assert len(weights(trainer)) == len(list(trainer.loss.model.named_parameters()))
