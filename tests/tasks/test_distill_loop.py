"""One process: accumulation, interruption, prefetching and activation checkpointing change nothing; the curves say what happened."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tasks.distill.config import LoraSettings
from tasks.distill.optimizer import make_optimizer
from tasks.distill.prefetch import Prefetch
from tasks.distill.start_checks import check_rows
from tasks.packed_files import PackedRows
from tasks.stage import UserError
from tests.core.tiny import tiny_model
from tests.tasks.tiny_training import changed, make_trainer, reproducible, silent, weights, write_rows

DROPOUT = {"attention_dropout": 0.3}


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process, as meant


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("packed") / "packed.parquet", rows=16)


def same_weights(one, other) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stopped_at", [1, 2, 3])
def test_resumed_equals_uninterrupted_bit_for_bit(packed, tmp_path, stopped_at):
    """With dropout, with checkpoints (every 2) and points of the curves (every 3) at different steps, and stopped at neither."""
    config = changed(log_every=3, weight_decay=0.1)
    whole = make_trainer(packed, config, **DROPOUT)
    whole.run(log=silent, save=silent)

    stopped = make_trainer(packed, config, **DROPOUT)
    saved = []

    def save(trainer):
        trainer.save(tmp_path / str(trainer.step))
        saved.append(trainer.step)

    stopped.run(log=silent, save=save, stop=lambda: stopped.step == stopped_at)
    assert saved == [1, 2, 2][stopped_at - 1 : stopped_at] if stopped_at < 3 else saved == [2, 3]
    torch.manual_seed(999)  # another process has drawn other numbers
    resumed = make_trainer(packed, config, seed=9, **DROPOUT)
    resumed.resume(tmp_path / str(stopped_at))
    assert resumed.step == stopped_at
    resumed.run(log=silent, save=silent)
    assert [point["step"] for point in whole.curves.points] == [3, 4]
    assert reproducible(resumed.curves.points) == reproducible(whole.curves.points)
    assert same_weights(resumed, whole)
    assert resumed.tokens == whole.tokens == 2 * int(whole.rows.lengths.sum())


def test_adapters_resume_bit_for_bit_and_the_rest_is_neither_trained_nor_saved(packed, tmp_path):
    pytest.importorskip("peft")
    config = changed(lora=LoraSettings(rank=4, dropout=0.2), weight_decay=0.1)
    whole = make_trainer(packed, config)
    before = weights(whole)
    whole.run(log=silent, save=lambda t: t.save(tmp_path / str(t.step)))
    resumed = make_trainer(packed, config)
    for name, parameter in resumed.loss.named_parameters():
        if "lora_" in name:
            parameter.data.fill_(0.5)  # all to be replaced
    resumed.resume(tmp_path / "2")
    resumed.run(log=silent, save=silent)
    assert reproducible(resumed.curves.points) == reproducible(whole.curves.points)
    assert same_weights(resumed, whole)
    changed_names = {name for name, weight in weights(whole).items() if not torch.equal(weight, before[name])}
    assert changed_names
    assert all("lora_" in name for name in changed_names)
    saved = FileSystemReader(tmp_path / "2").read_metadata().state_dict_metadata
    assert all("lora_" in name for name in saved if name.startswith("model."))


def test_dropout_is_on_and_drawn_from_the_seed(packed):
    runs = [make_trainer(packed, changed(seed=0), **model) for model in (DROPOUT, DROPOUT, {})]
    for run in runs:
        run.run(log=silent, save=silent)
    assert same_weights(runs[0], runs[1])
    assert not same_weights(runs[0], runs[2])


@pytest.mark.parametrize("accumulation", [2, 8])
def test_accumulation_changes_nothing(packed, accumulation):
    one, many = make_trainer(packed), make_trainer(packed, changed(accumulation=accumulation))
    for trainer in (one, many):
        trainer.run(log=silent, save=silent)
    for mine, theirs in zip(reproducible(one.curves.points), reproducible(many.curves.points), strict=True):
        assert theirs == pytest.approx(mine, rel=1e-8)
    for mine, theirs in zip(weights(one).values(), weights(many).values(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-8, atol=1e-10)


def test_activation_checkpointing_changes_nothing(packed):
    plain, checkpointed = make_trainer(packed, **DROPOUT), make_trainer(packed, **DROPOUT)
    checkpointed.loss.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    for trainer in (plain, checkpointed):
        trainer.run(log=silent, save=silent)
    assert same_weights(plain, checkpointed)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_bfloat16_products_give_nearly_the_same_gradients_and_resume_bit_for_bit(packed, tmp_path, checkpointed):
    wide, narrow = (make_trainer(packed, changed(compute_dtype=t, dtype="float32"), dtype=torch.float32) for t in (None, "bfloat16"))
    if checkpointed:
        narrow.loss.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    wide.run(log=silent, save=silent)
    narrow.run(log=silent, save=lambda t: t.save(tmp_path / str(t.step)))
    assert not same_weights(wide, narrow)
    assert {p.dtype for p in narrow.loss.parameters()} == {torch.float32}
    mine, theirs = wide.curves.points[0], narrow.curves.points[0]  # of the first step: at this learning rate rounding grows later
    assert theirs["loss"] == pytest.approx(mine["loss"], rel=0.01)
    assert theirs["gradient_norm"] == pytest.approx(mine["gradient_norm"], rel=0.05)
    resumed = make_trainer(packed, narrow.config, dtype=torch.float32, seed=9)
    resumed.resume(tmp_path / "2")
    resumed.run(log=silent, save=silent)
    assert same_weights(resumed, narrow)


def test_training_lowers_the_loss(packed):
    trainer = make_trainer(packed, changed(epochs=12))
    trainer.run(log=silent, save=silent)
    points = trainer.curves.points
    assert points[-1]["loss"] < 0.7 * points[0]["loss"]
    assert points[-1]["tokens"] == 12 * int(trainer.rows.lengths.sum())


def test_a_point_is_the_mean_over_the_tokens_of_its_steps(packed):
    """Means over two steps' tokens, from the numbers of the single steps."""
    single, double = make_trainer(packed), make_trainer(packed, changed(log_every=2))
    for trainer in (single, double):
        trainer.run(log=silent, save=silent)
    rows, plan = single.rows, single.plan
    for i, point in enumerate(double.curves.points):
        pair = single.curves.points[2 * i : 2 * i + 2]
        for name, counts in (("ar", rows.ar_tokens), ("consistency", rows.consistency_tokens), ("agreement", rows.consistency_tokens)):
            tokens = [int(counts[plan.rows(2 * i + j)].sum()) for j in (0, 1)]
            assert point[name] == pytest.approx(np.average([p[name] for p in pair], weights=tokens))
        assert point["loss"] == pytest.approx(point["consistency"] + 2.0 * point["ar"])
        assert point["gradient_norm"] == pair[1]["gradient_norm"]


def test_consistency_is_split_by_window_position(tmp_path):
    """The first block of a linear window is all clean: it has no curve. A window of one has no split."""
    trainer = make_trainer(write_rows(tmp_path / "three.parquet", rows=8, window=3), changed(epochs=1))
    trainer.run(log=silent, save=silent)
    (point,) = trainer.curves.points
    parts = {name: value for name, value in point.items() if name.startswith("consistency_position")}
    assert set(parts) == {"consistency_position_01", "consistency_position_02"}
    assert min(parts.values()) <= point["consistency"] <= max(parts.values())
    trainer = make_trainer(write_rows(tmp_path / "one.parquet", rows=8, window=1), changed(epochs=1))
    trainer.run(log=silent, save=silent)
    assert not any(name.startswith("consistency_position") for name in trainer.curves.points[0])


def test_a_gradient_that_is_no_number_is_an_error_and_never_a_checkpoint(packed):
    saved = []
    trainer = make_trainer(packed, changed(log_every=100, checkpoint_every=3, epochs=4))
    trainer.loss.model.model.norm.weight.data[0] = math.inf
    with pytest.raises(UserError, match=r"not a finite number at or before step 3.*distill\.learning_rate"):
        trainer.run(log=silent, save=lambda t: t.save(Path("never")) or saved.append(t.step))
    assert not saved


def test_only_matrices_decay_and_frozen_weights_are_left_alone():
    model = tiny_model()  # qwen2: has biases and norms
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    optimizer, _ = make_optimizer(model, changed(weight_decay=0.5), total_steps=10)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = None if not parameter.requires_grad else 0.0 if name.endswith((".bias", "norm.weight")) else 0.5
        assert decays.get(id(parameter)) == expected, name


def test_the_next_step_is_loaded_while_this_one_computes():
    loaded = []

    def load(step):
        time.sleep(0.05)
        loaded.append(step)
        return step

    batches = Prefetch(load, stop=4)
    assert batches(0) == 0
    first = batches.waited
    assert first >= 0.05
    for step in (1, 2, 3):
        time.sleep(0.1)  # the step's computation
        assert batches(step) == step
    assert batches.waited - first < 0.05
    assert loaded == [0, 1, 2, 3]
    assert batches(1) == 1  # any position can be asked for
    batches.close()


def test_what_the_loader_raises_reaches_the_loop():
    def load(step):
        if step == 1:
            raise UserError("packed.parquet: broken")
        return step

    batches = Prefetch(load, stop=3)
    batches(0)
    with pytest.raises(UserError, match="broken"):
        batches(1)
    batches.close()


def test_rows_that_do_not_fit_the_model_are_refused_before_the_first_step(packed):
    rows = PackedRows(packed)
    check_rows(packed, rows, tiny_model())
    largest = max(int(row.input_ids.max()) for row in rows.read(range(len(rows))))
    check_rows(packed, rows, tiny_model(vocab_size=largest + 1))
    with pytest.raises(UserError, match=rf"packed\.parquet: holds token {largest}, the model's vocabulary has {largest}"):
        check_rows(packed, rows, tiny_model(vocab_size=largest))
    longest = 1 + max(int(row.position_ids.max()) for row in rows.read(range(len(rows))))
    check_rows(packed, rows, tiny_model(max_position_embeddings=longest))
    with pytest.raises(UserError, match=rf"a text of {longest} tokens.*context length is {longest - 1}"):
        check_rows(packed, rows, tiny_model(max_position_embeddings=longest - 1))
    rows.ar_tokens = np.where(np.arange(len(rows)) == 3, 0, rows.ar_tokens)
    rows.consistency_tokens = np.where(np.arange(len(rows)) == 3, 0, rows.consistency_tokens)
    with pytest.raises(UserError, match="row 3 of 16 holds no token with a loss"):
        check_rows(packed, rows, tiny_model())
