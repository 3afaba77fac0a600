"""The watch over a training run: the same numbers every time, an alarm for collapsed models, none for the teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.greedy_batch import greedy_batch
from jacobi_core.decoding.stats import DecodingStats, Generation
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.distillation.losses import PackedLoss
from jacobi_core.hub import load_model, load_tokenizer, save_checkpoint
from tasks import artifacts
from tasks.distill.adapters import with_adapters
from tasks.distill.config import LoraSettings, ProbeSettings
from tasks.distill.probe import Probe, probe_prompts
from tasks.distill.weights import gathered
from tasks.stage import UserError
from tests.tasks.tiny_stage import CONTEXT_LENGTH, write_split

SETTINGS = ProbeSettings(every=1, prompts=11, max_new_tokens=40, block_size=8)
NO_LORA = LoraSettings()


@pytest.fixture(scope="module")
def prompts(prompts_folder) -> list[list[int]]:
    return [p.input_ids for p in artifacts.read_prompts(prompts_folder, "train")]


def make(folder: Path, prompts, settings: ProbeSettings = SETTINGS, lora: LoraSettings = NO_LORA) -> Probe:
    return Probe(folder, prompts, settings, lora=lora, dtype="float64")


def state_of(model) -> dict[str, torch.Tensor]:
    return gathered(PackedLoss(model, window=2), rank=0)


def changed(folder: Path, change) -> dict[str, torch.Tensor]:
    """The weights of `folder` after change(model)."""
    model = load_model(folder, dtype="float64")
    with torch.no_grad():
        change(model)
    return state_of(model)


def one_token_only(model) -> None:
    model.model.norm.weight.zero_()  # all logits equal: always token 0


def never_an_end(model) -> None:
    model.get_output_embeddings().weight[model.generation_config.eos_token_id] = 0.0


def a_little_noise(model) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.003)


def test_the_teacher_itself_never_trips_and_is_measured_the_same_every_time(base_folder, prompts):
    strictest = ProbeSettings(every=1, prompts=11, max_new_tokens=40, block_size=8, collapse_share=1.0)
    generator = torch.get_rng_state()
    probe = make(base_folder, prompts, strictest)
    again = probe(state_of(load_model(base_folder, dtype="float64")))
    assert again == probe.teacher
    assert again.verdict is None and again.metrics["equal_to_teacher"] == 1.0
    assert torch.equal(torch.get_rng_state(), generator)
    assert probe(changed(base_folder, one_token_only)) != again == probe(state_of(load_model(base_folder, dtype="float64")))


def test_figures_are_those_of_decoding_prompt_by_prompt(base_folder, prompts):
    probe, state = make(base_folder, prompts), changed(base_folder, a_little_noise)
    found = probe(state)
    student, teacher = load_model(base_folder, dtype="float64"), load_model(base_folder, dtype="float64")
    student.load_state_dict(state, strict=False)
    rules = TokenRules.of(teacher, load_tokenizer(base_folder))
    config = DecodingConfig(block_size=8, max_new_tokens=40)
    alone = [generate(student, torch.tensor(p), config, rules=rules, prompt_id=i) for i, p in enumerate(prompts)]
    answers = [[a.tokens.tolist() for a in greedy_batch(m, prompts, max_new_tokens=40, rules=rules)] for m in (student, teacher)]
    assert [g.new_tokens.tolist() for g in alone] == answers[0]
    metrics, tokens, forwards = found.metrics, sum(map(len, answers[0])), sum(g.stats.forwards for g in alone)
    assert metrics["tpf"] == tokens / forwards and metrics["mean_tokens"] == tokens / len(prompts)
    assert metrics["equal_to_teacher"] == sum(mine == theirs for mine, theirs in zip(*answers, strict=True)) / len(prompts)
    assert 0 < metrics["equal_to_teacher"] < 1  # else this test says little
    assert metrics["eos_rate"] == sum(a[-1] in rules.eos_ids for a in answers[0]) / len(prompts)
    pairs = [(a[i], a[i + 1]) for a in answers[0] for i in range(len(a) - 1)]
    assert metrics["distinct_2"] == len(set(pairs)) / len(pairs)
    assert metrics["distinct_1"] == len({t for a in answers[0] for t in a}) / tokens
    accepted = sum(sum(n > 1 for n in g.stats.committed_per_forward) for g in alone) / forwards
    assert metrics["accepted_1"] == found.accepted_by_position[0] == accepted
    assert found.verdict is None


@pytest.mark.parametrize(("collapse", "says"), [(one_token_only, "distinct_2 0.002, teacher 0.884"), (never_an_end, "eos_rate 0.000, teacher 0.727")])
def test_a_collapsed_model_trips_the_alarm(base_folder, prompts, collapse, says):
    verdict = make(base_folder, prompts)(changed(base_folder, collapse)).verdict
    assert verdict.startswith("the model collapses: ") and says in verdict and "collapse_share=0.5" in verdict
    assert ("distinct_2" in verdict) is (collapse is one_token_only)


def test_a_model_that_only_says_the_end_trips_it_too(base_folder, prompts, tmp_path):
    model, tokenizer = load_model(base_folder), load_tokenizer(base_folder)
    model.generation_config.eos_token_id = [0, *model.generation_config.eos_token_id]
    save_checkpoint(model, tokenizer, tmp_path / "base", generation_config=model.generation_config)
    found = make(tmp_path / "base", prompts)(changed(tmp_path / "base", one_token_only))
    assert found.metrics["eos_rate"] == 1.0 and found.metrics["mean_tokens"] == 1.0
    assert "distinct_2 0.000" in found.verdict


@pytest.mark.parametrize(("ended", "trips"), [(0, False), (3, False), (4, True)])
def test_a_teacher_that_hardly_ends_is_no_measure_of_ending(ended, trips):
    from tasks.distill.probe import _verdict

    teacher = {"distinct_2": 0.5, "mean_tokens": 30.0, "eos_rate": ended / 16}
    assert (_verdict({**teacher, "eos_rate": 0.0}, teacher, 16, 0.5) is not None) is trips


@pytest.mark.parametrize(("tokens", "trips"), [(2, True), (20, False)])
def test_varied_answers_that_end_early_trip_it(base_folder, prompts, monkeypatch, tokens, trips):
    """No bigram twice, and every answer ends: only their length tells."""
    probe = make(base_folder, prompts)
    assert probe.teacher.metrics["mean_tokens"] < 40
    answers = [
        Generation(torch.arange(tokens) + number * tokens, DecodingStats(committed_per_forward=[tokens], stop_reason="eos"))
        for number in range(len(prompts))
    ]
    monkeypatch.setattr("jacobi_core.decoding.generate.generate_batch", lambda *args, **kwargs: answers)
    found = probe(state_of(load_model(base_folder, dtype="float64")))
    assert found.metrics["distinct_2"] == found.metrics["eos_rate"] == 1.0 and found.metrics["mean_tokens"] == tokens
    if trips:
        assert f"mean_tokens 2.000, teacher {probe.teacher.metrics['mean_tokens']:.3f}, on 11" in found.verdict
        assert "distinct_2" not in found.verdict and "eos_rate" not in found.verdict
    else:
        assert found.verdict is None


def test_adapters_are_probed_as_what_they_merge_to(base_folder, prompts):
    lora = LoraSettings(rank=2)
    model = with_adapters(load_model(base_folder, dtype="float64"), lora, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.01)
    probe = make(base_folder, prompts, lora=lora)
    found = probe(state_of(model))
    for module in list(model.modules()):
        if hasattr(module, "merge"):
            module.merge()
    plain = {name.replace("base_layer.", ""): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    assert found == make(base_folder, prompts)(plain)
    assert found != probe.teacher


def test_prompts_are_validation_ones_else_training_ones(prompts_folder, prompts, tmp_path):
    validation = [p.input_ids for p in artifacts.read_prompts(prompts_folder, "validation")]
    assert probe_prompts(prompts_folder, 16) == validation and probe_prompts(prompts_folder, 1) == validation[:1]
    train = write_split(tmp_path / "train", artifacts.read_prompts(prompts_folder, "train"))
    assert probe_prompts(train, 4) == prompts[:4]
    test = write_split(tmp_path / "test", artifacts.read_prompts(prompts_folder, "test"))
    with pytest.raises(UserError, match="no prompts to probe with"):
        probe_prompts(test, 4)


def test_prompts_that_do_not_fit_the_context_are_left_out(base_folder, prompts):
    settings = ProbeSettings(every=1, max_new_tokens=8, block_size=8)
    long = [7] * (CONTEXT_LENGTH - 7)
    assert make(base_folder, [long, *prompts[:2]], settings).teacher == make(base_folder, prompts[:2], settings).teacher
    with pytest.raises(UserError, match=r"distill\.probe\.max_new_tokens=8.*context of 256"):
        make(base_folder, [long], settings)
