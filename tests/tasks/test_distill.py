"""Which rows make up which step, and which settings are refused. No model here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tasks.distill import stage
from tasks.distill.config import DistillConfig, Length, LoraSettings, MatchedDistillConfig, ProbeSettings, Select
from tasks.distill.data import StepPlan, check_divides
from tasks.stage import UserError


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


def test_as_many_tokens_as_others_is_what_they_plan_whatever_their_length(monkeypatch):
    rows = {"a": np.arange(10, 22), "b": np.arange(30, 53)}
    monkeypatch.setattr(stage, "PackedRows", lambda path: SimpleNamespace(lengths=rows[path.parent.name]))
    inputs = {f"budget/{name}": Path(name) for name in rows}
    lengths = {"a": Length(epochs=2.5, max_steps=None), "b": Length(epochs=9, max_steps=7)}
    matched = stage._matched_tokens(MatchedDistillConfig(batch_size=4, seed=3, epochs=77, matched=lengths), inputs)
    plans = {
        n: StepPlan.make(DistillConfig(batch_size=4, seed=3, epochs=length.epochs, max_steps=length.max_steps), rows[n])
        for n, length in lengths.items()
    }
    assert (plans["a"].total_steps, plans["b"].total_steps) == (7, 7)
    assert matched == sum(int(rows[name][plan.order].sum()) for name, plan in plans.items())
    alone = StepPlan.make(DistillConfig(batch_size=4, seed=3, epochs=2.5), rows["a"])
    again = StepPlan.make(DistillConfig(batch_size=4, seed=3), rows["a"], token_budget=alone.tokens(rows["a"]))
    assert again.order.tolist() == alone.order.tolist()  # one round alone is matched to the step


def test_batches_that_cannot_be_shared_are_refused():
    check_divides(DistillConfig(batch_size=8, accumulation=2), workers=4)
    with pytest.raises(UserError, match=r"batch_size=8.*workers=3"):
        check_divides(DistillConfig(batch_size=8), workers=3)
    with pytest.raises(UserError, match=r"batch_size=8.*5 packed rows"):
        StepPlan.make(DistillConfig(batch_size=8), np.ones(5, dtype=int))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *(
            (DistillConfig, name, 0)
            for name in ("learning_rate", "batch_size", "accumulation", "epochs", "max_steps", "checkpoint_every", "log_every")
        ),
        *((DistillConfig, name, -1.0) for name in ("ar_weight", "weight_decay", "temperature", "max_grad_norm")),
        *((DistillConfig, name, 1.0) for name in ("adam_beta1", "adam_beta2", "warmup_share")),
        (DistillConfig, "dtype", "float16"),
        (LoraSettings, "rank", -1),
        (LoraSettings, "alpha", 0),
        (LoraSettings, "dropout", 1.0),
        (LoraSettings, "target_modules", []),
        (ProbeSettings, "every", -1),
        *((ProbeSettings, name, 0) for name in ("prompts", "max_new_tokens", "block_size")),
        (ProbeSettings, "collapse_share", 1.5),
    ],
)
def test_settings_that_cannot_be_used_are_named(kind, field, value):
    with pytest.raises(ValueError, match=rf"^{field} must "):
        kind(**{field: value})


def test_unknown_choices_are_refused():
    for field in ("mask", "attention", "lr_schedule", "select"):
        with pytest.raises(ValueError, match="zigzag"):
            DistillConfig(**{field: "zigzag"})


def test_the_best_is_chosen_only_where_something_is_measured():
    with pytest.raises(ValueError, match=r"select=best.*probe\.every"):
        DistillConfig(select="best", probe=ProbeSettings(every=0))
    assert DistillConfig(select="best", probe=ProbeSettings(every=1)).select is Select.best


def test_a_checkpoint_needs_no_relation_to_the_points_of_the_curves():
    assert DistillConfig(checkpoint_every=7, log_every=10).checkpoint_every == 7
