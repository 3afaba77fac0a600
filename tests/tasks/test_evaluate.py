"""Rows after the results contract, against what can be counted by hand on a tiny model; the wrong is listed, and plain greedy is the baseline."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch

from jacobi_core.decoding import generate as generate_module
from jacobi_core.decoding import greedy_batch as greedy_module
from jacobi_core.decoding.config import Method
from jacobi_core.hub import load_model, load_tokenizer
from tasks import artifacts
from tasks.evaluate import WARM_UP, EvaluateConfig, run
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.stage import StageContext, UserError
from tests.results import row as contract_row
from tests.tasks.tiny_stage import write_split

SPEED = 3
SAME = ("tokens", "forwards", "stop_reasons", "equals_ar")  # of a row, when run again


def settings(**changes) -> EvaluateConfig:
    base = {"accuracy_prompts": 5, "speed_prompts": SPEED, "block_sizes": [4, 8], "max_new_tokens": 20, "batch_size": 2, "dtype": "float64"}
    return EvaluateConfig(**{**base, "sandbox": SandboxConfig(allow_code_execution=True), **changes})


def evaluate(config, inputs, output):
    """(metrics, evaluation.json, answers.json)."""
    output.mkdir()
    metrics = run(config, inputs, output, StageContext())
    return metrics, artifacts.read_json(output / "evaluation.json"), artifacts.read_json(output / "answers.json")


@pytest.fixture
def test_prompts(prompts_folder):
    return artifacts.read_prompts(prompts_folder, "test")


@pytest.fixture
def untested_inputs(tmp_path, test_prompts, base_folder):
    """A user's prompts: nothing to run, no problem ids."""
    bare = [dataclasses.replace(p, meta={"problem_set": "mine"}) for p in test_prompts]
    return {"prompts": write_split(tmp_path / "untested", bare), "model": base_folder}


@pytest.fixture
def calls(monkeypatch):
    """Every decoding of the speed part, in order: (prompt id, method, block size)."""
    made, original = [], generate_module.generate

    def generate(model, ids, config, **kwargs):
        made.append((kwargs["prompt_id"], config.method, config.block_size))
        return original(model, ids, config, **kwargs)

    monkeypatch.setattr(generate_module, "generate", generate)
    return made


def test_rows_follow_the_contract(tmp_path, stage_inputs, test_prompts):
    config = settings(methods=["jacobi", "running_window"])
    metrics, evaluation, answers = evaluate(config, stage_inputs, tmp_path / "out")
    rows = evaluation["rows"]
    assert [(r["method"], r["block_size"]) for r in rows] == [
        ("ar", 1),
        ("jacobi", 4),
        ("jacobi", 8),
        ("running_window", 4),
        ("running_window", 8),
    ]
    lengths = [a["tokens"] for a in answers[:SPEED]]
    reasons = [a["stop_reason"] for a in answers[:SPEED]]
    for r in rows:
        assert r.keys() == contract_row().keys()
        assert (r["model"], r["benchmark"], r["batch_size"], r["dtype"], r["train_tokens"]) == ("base", "tiny", 1, "float64", 0)
        assert r["prompts"] == SPEED and r["tokens"] == sum(lengths)  # warm-up not counted, EOS counted
        assert r["tpf"] == pytest.approx(r["tokens"] / r["forwards"])
        assert r["tps"] == pytest.approx(r["tokens"] / r["seconds"])
        assert r["speedup"] == pytest.approx(r["tps"] / rows[0]["tps"])
        assert r["stop_reasons"] == {reason: reasons.count(reason) for reason in set(reasons)}
        assert r["equals_ar"] == 1.0
        assert (r["accuracy"], r["accuracy_prompts"]) == (0.0, 5)  # a random model
        assert r["forwards"] == sum(evaluation["accepted_lengths"][f"{r['method']}@{r['block_size']}"].values())
    assert rows[0]["tpf"] == 1.0 and rows[0]["speedup"] == 1.0
    assert sum(rows[0]["stop_reasons"].values()) == SPEED
    assert all(sum(int(k) * v for k, v in counts.items()) == sum(lengths) for counts in evaluation["accepted_lengths"].values())
    assert evaluation["differences"] == []
    assert (evaluation["model"], evaluation["benchmark"], evaluation["model_path"]) == ("base", "tiny", str(stage_inputs["model"]))
    assert [a["id"] for a in answers] == [p.id for p in test_prompts]
    best = max(rows[1:], key=lambda r: r["tps"])
    assert metrics == {
        "accuracy": 0.0,
        "ar_tps": rows[0]["tps"],
        "best_tpf": best["tpf"],
        "best_speedup": best["speedup"],
        "equals_ar": 1.0,
    }


def test_samples_show_what_was_said(tmp_path, stage_inputs, test_prompts):
    _, evaluation, answers = evaluate(settings(), stage_inputs, tmp_path / "out")
    assert len(evaluation["samples"]) == SPEED
    for sample, prompt, answer in zip(evaluation["samples"], test_prompts, answers, strict=False):
        assert sample["problem_id"] == prompt.meta["problem_id"] and sample["prompt"] == prompt.messages[-1]["content"]
        assert sample["ar"] == sample["jacobi"] == answer["text"] and sample["passed"] is False
    # and that is plain greedy text
    model, tokenizer = load_model(stage_inputs["model"], dtype="float64"), load_tokenizer(stage_inputs["model"])
    for prompt, answer in zip(test_prompts, answers, strict=True):
        ids = list(prompt.input_ids)
        for _ in range(answer["tokens"]):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert tokenizer.decode(ids[len(prompt.input_ids) :], skip_special_tokens=True) == answer["text"]


def test_methods_take_turns_after_a_warm_up(tmp_path, stage_inputs, test_prompts, calls):
    evaluate(settings(), stage_inputs, tmp_path / "out")
    kinds = [(Method.ar, 1), (Method.jacobi, 4), (Method.jacobi, 8)]
    groups = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    expected = [p.id for p in [*test_prompts[:WARM_UP], *test_prompts[:SPEED]]]
    assert [g[0][0] for g in groups] == expected
    for group in groups:
        assert len({identity for identity, *_ in group}) == 1 and sorted(k for _, *k in group) == sorted(map(list, kinds))
    assert len({tuple(g[0][1:]) for g in groups}) == 3  # nobody always goes first


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_prompts_than_a_warm_up(tmp_path, stage_inputs, count):
    _, evaluation, answers = evaluate(settings(accuracy_prompts=count), stage_inputs, tmp_path / "out")
    assert len(answers) == count
    assert all(r["prompts"] == count and r["seconds"] > 0 for r in evaluation["rows"])


def test_accuracy_is_the_share_of_answers_whose_tests_pass(tmp_path, stage_inputs, test_prompts, monkeypatch):
    tokenizer = load_tokenizer(stage_inputs["model"])
    texts = {tuple(p.input_ids): p.meta["solution"] for p in test_prompts[:2]}

    def know_some(model, prompts, *, max_new_tokens, rules):
        answers = [tokenizer(texts.get(tuple(p), "I cannot."))["input_ids"] + [tokenizer.eos_token_id] for p in prompts]
        return [greedy_module.GreedyAnswer(torch.tensor(a), "eos") for a in answers]

    monkeypatch.setattr(greedy_module, "greedy_batch", know_some)
    metrics, evaluation, answers = evaluate(settings(), stage_inputs, tmp_path / "out")
    assert metrics["accuracy"] == 2 / 5
    assert {(r["accuracy"], r["accuracy_prompts"]) for r in evaluation["rows"]} == {(2 / 5, 5)}
    assert [a["passed"] for a in answers] == [True, True, False, False, False]
    assert [a["reason"] for a in answers] == ["passed", "passed", *["no_completion"] * 3]
    assert answers[0]["text"] == test_prompts[0].meta["solution"]
    assert [s["passed"] for s in evaluation["samples"]] == [True, True, False]


def test_prompts_without_tests_have_no_accuracy(tmp_path, untested_inputs):
    metrics, evaluation, answers = evaluate(settings(sandbox=SandboxConfig()), untested_inputs, tmp_path / "out")
    assert "accuracy" not in metrics
    assert {(r["accuracy"], r["accuracy_prompts"], r["benchmark"]) for r in evaluation["rows"]} == {(None, 0, "mine")}
    assert all("passed" not in a for a in answers) and {s["passed"] for s in evaluation["samples"]} == {None}


def test_no_code_runs_without_permission(tmp_path, stage_inputs, test_prompts, monkeypatch):
    tokenizer = load_tokenizer(stage_inputs["model"])
    solution = torch.tensor(tokenizer(test_prompts[0].meta["solution"])["input_ids"])
    monkeypatch.setattr(greedy_module, "greedy_batch", lambda model, prompts, **_: [greedy_module.GreedyAnswer(solution, "length") for _ in prompts])
    with pytest.raises(UserError, match="allow_code_execution"):
        evaluate(settings(sandbox=SandboxConfig()), stage_inputs, tmp_path / "out")


def test_penalties_of_a_checkpoint_do_not_apply(tmp_path, untested_inputs, test_prompts):
    penalised = tmp_path / "penalised"
    shutil.copytree(untested_inputs["model"], penalised)
    file = penalised / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 1.3}))
    model = load_model(penalised, dtype="float64")
    assert model.generation_config.repetition_penalty == 1.3
    ids = torch.tensor([test_prompts[0].input_ids])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)[0, ids.shape[1] :]  # transformers does apply it
    _, plain, answers = evaluate(settings(), untested_inputs, tmp_path / "plain")
    _, other, other_answers = evaluate(settings(), {**untested_inputs, "model": penalised}, tmp_path / "other")
    assert other_answers == answers
    assert load_tokenizer(penalised).decode(said, skip_special_tokens=True) != answers[0]["text"]
    for a, b in zip(plain["rows"], other["rows"], strict=True):
        assert {k: a[k] for k in SAME} == {k: b[k] for k in SAME}


@pytest.mark.parametrize("known", [True, False])
def test_a_decoder_that_errs_is_found_and_listed(tmp_path, stage_inputs, untested_inputs, test_prompts, monkeypatch, known):
    inputs, victim, original = stage_inputs if known else untested_inputs, test_prompts[1], generate_module.generate

    def corrupt(model, ids, config, **kwargs):
        generation = original(model, ids, config, **kwargs)
        if kwargs["prompt_id"] == victim.id and config.block_size == 8:
            generation.new_tokens = generation.new_tokens.clone()
            generation.new_tokens[2] += 1
        return generation

    monkeypatch.setattr(generate_module, "generate", corrupt)
    metrics, evaluation, _ = evaluate(settings(), inputs, tmp_path / "out")
    assert [r["equals_ar"] for r in evaluation["rows"]] == [1.0, 1.0, pytest.approx(1 - 1 / SPEED)]
    assert metrics["equals_ar"] == pytest.approx(1 - 1 / SPEED)
    (found,) = evaluation["differences"]
    model = load_model(inputs["model"], dtype="float64")
    ids = torch.tensor(victim.input_ids)
    for _ in range(2):
        ids = torch.cat([ids, model(input_ids=ids[None]).logits[0, -1].argmax()[None]])
    top = model(input_ids=ids[None]).logits[0, -1].topk(2).values
    assert found == {
        "model": "base",
        "problem_id": victim.meta["problem_id"] if known else str(victim.id),
        "method": "jacobi",
        "block_size": 8,
        "first_index": 2,
        "margin": pytest.approx((top[0] - top[1]).detach().item()),
        "kind": "defect",
    }


def test_an_empty_split_is_refused(tmp_path, stage_inputs):
    with pytest.raises(UserError, match=r"^evaluate\.split=nothing"):
        evaluate(settings(split="nothing"), stage_inputs, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "says"),
    [({name: 0}, name) for name in ("accuracy_prompts", "speed_prompts", "max_new_tokens", "batch_size")]
    + [({"block_sizes": [4, 0]}, "block_size"), ({"methods": ["magic"]}, "magic")],
)
def test_bad_settings_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        settings(**changes)
