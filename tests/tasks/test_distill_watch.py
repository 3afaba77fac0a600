"""Probing while training: the best weights are kept, a collapse ends it and stays known. The probe itself is a list of figures here."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from jacobi_core.hub import load_model
from tasks import artifacts
from tasks.distill import stage, worker
from tasks.distill.config import ProbeSettings
from tasks.distill.job import DistillJob
from tasks.distill.probe import ProbeResult
from tasks.distill.watch import Watch
from tasks.packed_files import PackedRows
from tasks.stage import StageContext, UserError, silent_reporter
from tests.core.tiny import tiny_model
from tests.tasks.tiny_training import changed, make_trainer, reproducible, silent, write_rows

COLLAPSED = "the model collapses: distinct_2 0.1, teacher 0.9"
HEALTHY = [1.5, 2.5, 2.0]  # tokens per forward at each probe


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process, as meant


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_rows(folder / "packed.parquet", rows=16)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(seed=1).save_pretrained(folder)
    return folder


class Figures:
    """A probe that says one number after the other; None is a collapse."""

    def __init__(self, tpf: Sequence[float | None]) -> None:
        self.tpf, self.states = list(tpf), []

    def __call__(self, state: Mapping[str, torch.Tensor]) -> ProbeResult:
        self.states.append({name: tensor.clone() for name, tensor in state.items()})
        found = self.tpf.pop(0)
        return ProbeResult({"tpf": found or 9.0}, [0.5], None if found else COLLAPSED)


def make_job(packed: Path, base: Path, output: Path, **settings) -> DistillJob:
    output.mkdir(exist_ok=True)
    config = changed(epochs=3, checkpoint_every=100, probe=ProbeSettings(every=2), **settings)
    return DistillJob(config, packed / "packed.parquet", base, None, output, None, 1, False, silent_reporter)


def train(job: DistillJob, probe: Figures, *, save=silent, stop=lambda: False, resume: Path | None = None):
    trainer = worker.make_trainer(job, PackedRows(job.packed), rank=0, workers=1)
    if resume:
        trainer.resume(resume)
    watch = Watch(probe, write=worker.weights_writer(job), folder=job.best)
    trainer.run(log=silent, save=save, probe=watch, stop=stop)
    if trainer.finished:
        worker.finish(job, trainer)
    return trainer


def result(job: DistillJob, packed: Path, monkeypatch) -> dict[str, float]:
    """What the stage makes of a folder in which training has ended; Ray is not there."""
    monkeypatch.setattr(stage, "_fit", None)
    inputs = {"packed": packed, "model": job.model}
    return stage.run(job.config, inputs, job.output, StageContext())


def same(folder: Path, state: Mapping[str, torch.Tensor]) -> bool:
    model = load_model(folder, dtype="float64")
    return all(torch.equal(parameter, state[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(("select", "step"), [("last", 6), ("best", 4)])
def test_the_selected_weights_leave_the_stage(packed, base, tmp_path, monkeypatch, select, step):
    job, probe = make_job(packed, base, tmp_path / "out", select=select), Figures(HEALTHY)
    trainer = train(job, probe)
    assert [point["step"] for point in trainer.probing.points] == [2, 4, 6]
    assert same(job.weights, probe.states[step // 2 - 1])
    training = artifacts.read_json(job.training)
    assert (training["selected_step"], training["best_step"], training["verdict"]) == (step, 4, None)
    assert training["train_tokens"] == trainer.tokens_after(step)
    assert [(p["step"], p["tpf"], p["accepted_by_position"]) for p in training["probes"]] == [(2, 1.5, [0.5]), (4, 2.5, [0.5]), (6, 2.0, [0.5])]
    metrics = result(job, packed, monkeypatch)
    assert (metrics["steps"], metrics["selected_step"], metrics["probe_tpf"]) == (6, step, HEALTHY[step // 2 - 1])
    assert sorted(path.name for path in job.output.iterdir()) == ["training.json", "weights"]


def test_a_probe_changes_nothing(packed, base, tmp_path):
    watched = train(make_job(packed, base, tmp_path / "out"), Figures(HEALTHY))
    alone = make_trainer(packed / "packed.parquet", changed(epochs=3))
    alone.run(log=silent, save=silent)
    assert reproducible(watched.curves.points) == reproducible(alone.curves.points)


def test_a_collapse_is_an_error_that_names_the_best_weights_and_is_said_again(packed, base, tmp_path, monkeypatch):
    job, probe = make_job(packed, base, tmp_path / "out"), Figures([2.0, None])
    trainer = train(job, probe)
    assert (trainer.step, trainer.probing.verdict) == (4, f"at step 4: {COLLAPSED}")
    for _ in range(2):  # the same command again
        with pytest.raises(UserError, match=rf"at step 4: {COLLAPSED}.*best/2.*Lower distill\.learning_rate.*ar_weight.*select=best") as caught:
            result(job, packed, monkeypatch)
        assert "\n" not in str(caught.value)
        assert same(job.best / "2", probe.states[0])
    assert not job.weights.exists()


def test_a_collapse_ends_well_where_the_best_is_wanted(packed, base, tmp_path, monkeypatch):
    job, probe = make_job(packed, base, tmp_path / "out", select="best"), Figures([2.0, None])
    train(job, probe)
    metrics = result(job, packed, monkeypatch)
    assert (metrics["collapsed_at"], metrics["selected_step"], metrics["steps"], metrics["probe_tpf"]) == (4, 2, 4, 2.0)
    assert same(job.weights, probe.states[0])


def test_a_collapse_before_any_healthy_probe_is_always_an_error(packed, base, tmp_path, monkeypatch):
    job = make_job(packed, base, tmp_path / "out", select="best")
    train(job, Figures([None]))
    with pytest.raises(UserError, match=r"at step 2: .*no probe before it was healthy\. Lower"):
        result(job, packed, monkeypatch)


@pytest.mark.parametrize("stopped_at", [2, 3, 4])
def test_the_best_survives_an_interruption(packed, base, tmp_path, stopped_at):
    """Checkpoints are taken after every probe; a stop is one too."""
    whole = make_job(packed, base, tmp_path / "whole", select="best")
    train(whole, Figures(HEALTHY))
    job = make_job(packed, base, tmp_path / "cut", select="best")
    checkpoints = tmp_path / "checkpoints"
    probe = Figures(HEALTHY)
    seen = []

    def stop():
        seen.append(None)
        return len(seen) > stopped_at

    train(job, probe, save=lambda t: t.save(checkpoints / str(t.step)), stop=stop)
    assert not job.training.exists()
    train(job, probe, resume=checkpoints / str(stopped_at))
    one, other = (artifacts.read_json(j.training) for j in (whole, job))
    for record in (one, other):
        del record["seconds"]
        record["curves"] = reproducible(record["curves"])
    assert json.dumps(one) == json.dumps(other)
    assert (whole.weights / "model.safetensors").read_bytes() == (job.weights / "model.safetensors").read_bytes()


def test_the_step_that_ends_training_has_a_point(packed, base, tmp_path, monkeypatch):
    job = make_job(packed, base, tmp_path / "out", select="best", log_every=100)
    train(job, Figures([2.0, None]))
    assert [point["step"] for point in artifacts.read_json(job.training)["curves"]] == [4]
    assert result(job, packed, monkeypatch)["collapsed_at"] == 4


def test_best_weights_stay_while_a_checkpoint_may_name_them(packed, base, tmp_path):
    job = make_job(packed, base, tmp_path / "out")
    job = dataclasses.replace(job, config=dataclasses.replace(job.config, epochs=5))
    train(job, Figures([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert sorted(int(folder.name) for folder in job.best.iterdir()) == [6, 8, 10]


def test_training_is_not_over_without_its_weights(packed, base, tmp_path):
    job = make_job(packed, base, tmp_path / "out", select="best")
    with pytest.raises(RuntimeError, match=r"best/4 is gone"):
        train(job, Figures(HEALTHY), stop=lambda: shutil.rmtree(job.best / "4", ignore_errors=True))
    assert not job.training.exists()


def test_a_run_resumed_after_its_collapse_trains_no_further(packed, base, tmp_path):
    job = make_job(packed, base, tmp_path / "out")
    checkpoints = tmp_path / "checkpoints"
    train(job, Figures([2.0, None]), save=lambda t: t.save(checkpoints / str(t.step)))
    job.training.unlink()  # the driver was killed before it could be read
    trainer = train(job, Figures([]), resume=checkpoints / "4")
    assert (trainer.step, trainer.finished) == (4, True)
    assert artifacts.read_json(job.training)["verdict"] == f"at step 4: {COLLAPSED}"


def test_an_attention_that_cannot_be_is_named(packed, base, tmp_path):
    job = make_job(packed, base, tmp_path / "out", attention="flash")
    with pytest.raises(UserError, match=r"distill\.attention=flash: "):
        worker.make_trainer(job, PackedRows(job.packed), rank=0, workers=1)


def test_the_real_probe_watches_a_real_run(packed, base_folder, prompts_folder, tmp_path):
    """At a rate of nothing the model is the teacher."""
    job = make_job(packed, base_folder, tmp_path / "out", learning_rate=1e-12)
    job = dataclasses.replace(job, prompts=prompts_folder, config=dataclasses.replace(job.config, epochs=1))
    trainer = worker.make_trainer(job, PackedRows(job.packed), rank=0, workers=1)
    trainer.run(log=silent, save=silent, probe=worker.make_watch(job, trainer))
    teacher, point = trainer.probing.points
    assert (teacher["step"], teacher["tpf"]) == (0, point["tpf"])
    assert (point["step"], point["equal_to_teacher"], trainer.probing.verdict) == (2, 1.0, None)
    assert trainer.probing.best == {"step": 2, "tpf": point["tpf"]}
    assert (job.best / "2" / "model.safetensors").exists()
