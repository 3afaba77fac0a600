"""One distillation, however it is cut up: workers, accumulation, interruption and export change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from safetensors import safe_open

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import pack_trajectory
from jacobi_core.hub import empty_model, load_model
from jacobi_core.trajectories.collect import collect
from tasks import artifacts
from tasks.distill import checkpoint
from tasks.distill.config import DistillConfig
from tasks.distill.data import StepPlan, check_divides
from tasks.distill.loop import Trainer
from tasks.stage import UserError
from tests.core.tiny import random_prompts, tiny_model, tiny_rules

ROWS = 16
SETTINGS = DistillConfig(
    learning_rate=1e-2, batch_size=8, epochs=2, ar_weight=2.0, checkpoint_every=2, log_every=1, warmup_share=0.25, dtype="float64"
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    model = tiny_model(seed=1)
    prompts = random_prompts(ROWS, seed=4)
    found = collect(model, prompts, list(range(ROWS)), block_size=4, max_new_tokens=14, seed=0, rules=tiny_rules(model, eos_ids=(10, 20, 30)))
    folder = tmp_path_factory.mktemp("packed")
    artifacts.write_packed(folder / "packed.parquet", [pack_trajectory(t, NoiseSchedule(window=2))[0] for t in found.trajectories])
    return folder


def trainer(packed: Path, config: DistillConfig = SETTINGS, model=None, **ranks) -> Trainer:
    rows = artifacts.PackedRows(packed / "packed.parquet")
    return Trainer(model or tiny_model(seed=1), rows, StepPlan.make(config, rows.lengths), config, **ranks)


def silent(*_args) -> None:
    pass


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def fsdp_worker(rank: int, workers: int, port: int, packed: Path, tied: bool, out: Path) -> None:
    import torch.distributed as dist

    from tasks.distill.sharding import shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=workers)
    sharded = trainer(packed, model=shard(tiny_model(seed=1, tied=tied), workers=workers), rank=rank, workers=workers)
    sharded.run(log=silent, save=lambda t: checkpoint.save(out, t.model, t.optimizer, t.progress(), rank=rank) if t.step == 4 else None)
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
def test_two_fsdp2_workers_train_and_export_what_one_process_does(packed, tmp_path, tied):
    alone = trainer(packed, model=tiny_model(seed=1, tied=tied))
    alone.run(log=silent, save=silent)
    port = 20_000 + (hash(str(tmp_path)) % 20_000)
    mp.spawn(fsdp_worker, args=(2, port, packed, tied, tmp_path / "dcp"), nprocs=2)
    progress = json.loads((tmp_path / "dcp" / "progress.json").read_text())
    for mine, theirs in zip(alone.curves, progress["curves"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-9)
    exported = tiny_model(seed=9, tied=tied)  # other weights, all to be replaced
    checkpoint.load_weights(tmp_path / "dcp", exported)
    for name, weight in weights(alone.model).items():
        torch.testing.assert_close(exported.state_dict()[name], weight)
    # a plain checkpoint: no tensor twice, and what from_pretrained reloads is bit-equal
    exported.save_pretrained(tmp_path / "export")
    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as file:
        assert len(file.keys()) == len(list(exported.named_parameters()))
    reloaded = load_model(tmp_path / "export", dtype="float64")
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(reloaded(input_ids=ids).logits, exported(input_ids=ids).logits)
    assert empty_model(tmp_path / "export").config.tie_word_embeddings is tied


def test_resumed_equals_uninterrupted_bit_for_bit(packed, tmp_path):
    whole = trainer(packed)
    whole.run(log=silent, save=lambda t: checkpoint.save(tmp_path / str(t.step), t.model, t.optimizer, t.progress(), rank=0))
    resumed = trainer(packed, model=tiny_model(seed=9))
    resumed.resume(tmp_path / "2")
    assert resumed.step == 2
    resumed.run(log=silent, save=silent)
    assert resumed.curves == whole.curves
    for name, weight in weights(whole.model).items():
        assert torch.equal(weights(resumed.model)[name], weight), name


@pytest.mark.parametrize("accumulation", [2, 8])
def test_accumulation_changes_nothing(packed, accumulation):
    one, many = trainer(packed), trainer(packed, DistillConfig(**{**vars(SETTINGS), "accumulation": accumulation}))
    for t in (one, many):
        t.run(log=silent, save=silent)
    for mine, theirs in zip(one.curves, many.curves, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-8)


def test_training_lowers_the_loss(packed):
    run = trainer(packed, DistillConfig(**{**vars(SETTINGS), "epochs": 12}))
    run.run(log=silent, save=silent)
    assert run.curves[-1]["loss"] < 0.7 * run.curves[0]["loss"]
    assert run.curves[-1]["tokens"] == 12 * int(run.rows.lengths.sum())


def test_every_row_once_per_epoch_whoever_trains_it():
    config = DistillConfig(batch_size=6, epochs=2, accumulation=1)
    lengths = np.arange(10, 22)
    plan = StepPlan.make(config, lengths)
    assert plan.total_steps == 4
    assert sorted(plan.order[:12]) == sorted(plan.order[12:]) == list(range(12))
    assert list(plan.order[:12]) != list(plan.order[12:])
    for workers, accumulation in ((1, 1), (2, 3), (3, 2), (6, 1)):
        shares = [plan.share(1, rank=r, workers=workers, accumulation=accumulation) for r in range(workers)]
        assert [int(i) for share in shares for part in share for i in part] == plan.rows(1).tolist()
        assert all(len(share) == accumulation for share in shares)
    assert StepPlan.make(DistillConfig(batch_size=6, epochs=0.1), lengths).total_steps == 1
    assert StepPlan.make(DistillConfig(batch_size=6, epochs=9, max_steps=3), lengths).total_steps == 3


@pytest.mark.parametrize("budget", [1, 95, 96, 400, 5000])
def test_token_budget_is_met_at_the_first_step_that_can(budget):
    lengths = np.arange(10, 22)
    plan = StepPlan.make(DistillConfig(batch_size=4), lengths, token_budget=budget)
    tokens = lengths[plan.order].reshape(-1, 4).sum(1).cumsum()
    assert tokens[-1] >= budget
    assert plan.total_steps == 1 or tokens[-2] < budget


def test_batches_that_cannot_be_shared_are_refused():
    check_divides(DistillConfig(batch_size=8, accumulation=2), workers=4)
    with pytest.raises(UserError, match=r"batch_size=8.*workers=3"):
        check_divides(DistillConfig(batch_size=8), workers=3)
    with pytest.raises(UserError, match=r"batch_size=8.*5 packed rows"):
        StepPlan.make(DistillConfig(batch_size=8), np.ones(5, dtype=int))
    for field, value in (("learning_rate", 0), ("batch_size", 0), ("max_steps", 0), ("mask", "zigzag")):
        with pytest.raises(ValueError, match=field if field != "mask" else "zigzag"):
            DistillConfig(**{field: value})
