"""One model on several benchmarks in one pipeline: the stages that `evaluate.benchmarks` adds, what reaches them, and the rows they end in."""

from __future__ import annotations

import copy
import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jacobi_core.decoding import greedy_batch as greedy_module
from jacobi_core.hub import load_tokenizer
from pipelines import stages
from pipelines.config import schema
from pipelines.errors import config_error
from pipelines.graph.dag import Graph
from tasks.artifacts import read_json, read_prompts
from tasks.prepare_prompts import template
from tasks.stage import StageContext, UserError
from tests.pipelines.configs import composed
from tests.tasks.tiny_benchmarks import GSM8K, KNOWN, SHOWN, build_model, jsonl, lessons, write_benchmarks
from tests.tasks.tiny_stage import write_jsonl

EVALUATION = ("answers", "speed", "evaluate")
FOUR = ["human_eval", "mbpp", "gsm8k", "math500"]  # the paper's
Files = dict[str, str]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def smoke() -> dict:
    """The smoke experiment, composed once, asking for one benchmark as a command line does."""
    asked = composed("experiment=smoke", "evaluate.benchmarks=[{name: gsm8k, max_new_tokens: 77}]")
    return OmegaConf.to_container(asked, resolve=False)


@pytest.fixture
def graph(smoke: dict, tmp_path: Path):
    """Benchmarks and settings, {"section.field": value} -> the stage graph."""

    def build(benchmarks: list[dict], settings: dict | None = None) -> Graph:
        config = OmegaConf.create(copy.deepcopy(smoke))
        for path, value in {**(settings or {}), "evaluate.benchmarks": benchmarks}.items():
            OmegaConf.update(config, path, value)
        return stages.build_graph(schema.build(config), identity_cache=tmp_path / "cache")

    return build


def asked(files: Files, *names: str, **more: object) -> list[dict]:
    return [{"name": name, "path": files.get(name), **more} for name in names]


def test_a_command_line_asks_for_a_benchmark(smoke: dict):
    (benchmark,) = schema.build(OmegaConf.create(smoke)).evaluate.benchmarks
    assert (benchmark.name.value, benchmark.max_new_tokens, benchmark.path) == ("gsm8k", 77, None)


def test_every_model_is_evaluated_on_every_benchmark_beside_the_data(graph, files: Files):
    names, models = [*FOUR, "minicode_long"], ["base", "round1", "round2", "cllm"]
    branch = {"baselines": ["cllm"]}
    plain, found = graph([], branch), graph(asked(files, *names), branch)
    added = [stage.id for stage in found.stages if stage.id not in plain.fingerprints]
    assert added[: len(names)] == [f"{name}/prompts" for name in names]
    assert added[len(names) :] == [f"{model}/{name}/{stage}" for model in models for name in names for stage in EVALUATION]
    inputs = {stage.id: stage.inputs for stage in found.stages}
    assert inputs["gsm8k/prompts"] == {"prompts": "prompts"}
    assert inputs["round1/gsm8k/answers"] == {"prompts": "gsm8k/prompts", "model": "round1/export"}
    assert inputs["base/mbpp/evaluate"].items() >= {"answers": "base/mbpp/answers", "speed": "base/mbpp/speed"}.items()
    told = [name for name in inputs["report"] if name.startswith("evaluate/")]
    assert told == [f"evaluate/{model}{what}" for model in models for what in ["", *(f"/{name}" for name in names)]]


def test_nothing_else_changes(graph, files: Files):
    """What was computed before benchmarks were asked for is found again."""
    tuned = {"tune": True, "data.validation": 4}
    plain, found = graph([], tuned).fingerprints, graph(asked(files, "gsm8k"), tuned).fingerprints
    assert {name for name in plain if plain[name] != found[name]} == {"excerpts", "report"}


def test_settings_reach_what_depends_on_them(graph, files: Files, tmp_path: Path):
    def changed(before: list[dict], after: list[dict]) -> set[str]:
        a, b = graph(before).fingerprints, graph(after).fingerprints
        return {name for name in a if a[name] != b[name] and "round" not in name}

    gsm8k, own = asked(files, "gsm8k"), {f"base/gsm8k/{stage}" for stage in EVALUATION} | {"excerpts", "report"}
    moved = {"gsm8k": str(write_jsonl(tmp_path / "copy.jsonl", GSM8K))}
    assert changed(gsm8k, asked(moved, "gsm8k")) == set()  # known by its content
    fewer = {"gsm8k": str(write_jsonl(tmp_path / "fewer.jsonl", GSM8K[:1]))}
    assert changed(gsm8k, asked(fewer, "gsm8k")) == own | {"gsm8k/prompts"}
    assert changed(gsm8k, asked(files, "gsm8k", max_new_tokens=50)) == own
    assert changed(gsm8k, asked(files, "gsm8k", accuracy_prompts=2)) == own - {"base/gsm8k/speed"}
    assert changed(gsm8k, asked(files, "gsm8k", speed_prompts=1)) == own - {"base/gsm8k/answers"}
    long = asked({}, "minicode_long")
    assert "minicode_long/prompts" in changed(long, asked({}, "minicode_long", accuracy_prompts=9))  # so many are generated
    assert "minicode_long/prompts" not in changed(long, asked({}, "minicode_long", max_new_tokens=50))


def test_the_hub_is_asked_for_what_no_file_gives(graph, monkeypatch: pytest.MonkeyPatch):
    wanted = []
    monkeypatch.setattr(stages, "hub_commit", lambda name, revision: wanted.append((name, revision)) or "c0ffee")
    found = {stage.id: stage for stage in graph(asked({}, *FOUR, revision="v1")).stages}
    assert wanted == [("google-research-datasets/mbpp", "v1"), ("openai/gsm8k", "v1"), ("HuggingFaceH4/MATH-500", "v1")]
    prompts = found["gsm8k/prompts"]
    assert (prompts.config.path, prompts.config.revision) == ("openai/gsm8k", "c0ffee")
    assert prompts.external == {"data": {"hub": "openai/gsm8k", "commit": "c0ffee"}, "benchmark_version": 1.0}
    assert "sha256" in found["human_eval/prompts"].external["data"]  # of the installed package


@pytest.mark.parametrize(
    ("benchmarks", "says"),
    [
        ([{"name": "gsm"}], "name: Invalid value 'gsm', expected one of [minicode, "),
        ([{"path": "x"}], "evaluate.benchmarks.0.name: "),
        ([{"name": "open_thoughts"}], "evaluate.benchmarks.0.name=open_thoughts: is no benchmark; choose one of minicode, minicode_long, human_eval"),
        ([{"name": "gsm8k"}, {"name": "gsm8k"}], "evaluate.benchmarks: gsm8k stands there twice"),
        ([{"name": "gsm8k", "speed_prompts": 0}], "evaluate.benchmarks.0.speed_prompts must be at least 1, got 0"),
        ([{"name": "minicode_long", "path": "x"}], "evaluate.benchmarks.0.path: minicode_long is generated here"),
        ([{"name": "minicode"}], "evaluate.benchmarks.0.name=minicode: the prompts of data are called that too"),
        ([{"name": "minicode_long"}, {"name": "gsm8k", "path": "no.jsonl"}], "evaluate.benchmarks.1.path=no.jsonl: cannot be read"),
    ],
)
def test_mistakes_are_named(graph, benchmarks: list[dict], says: str):
    with pytest.raises((UserError, OmegaConfBaseException)) as raised:
        graph(benchmarks)
    told = str(raised.value) if isinstance(raised.value, UserError) else config_error(raised.value)
    assert told.startswith(says)


def test_code_is_not_run_without_consent(graph, files: Files, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    mine = write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "a"}])
    refused = {"model.path": str(tmp_path / "model"), "data.source": "file", "data.path": str(mine), "evaluate.sandbox.allow_code_execution": False}
    graph(asked(files, "gsm8k", "math500"), refused)
    with pytest.raises(UserError, match=r"allow_code_execution is false, and evaluate\.benchmarks\.1\.name=mbpp is scored by running"):
        graph(asked(files, "gsm8k", "mbpp"), refused)


def run_stages(graph: Graph, folder: Path, wanted: str) -> None:
    """Those whose whole id matches, in order, in this process, each in folder/ID."""
    for stage in graph.stages:
        if re.fullmatch(wanted, stage.id):
            (folder / stage.id).mkdir(parents=True, exist_ok=True)
            module, _, function = stage.run.partition(":")
            inputs = {name: folder / source for name, source in stage.inputs.items()}
            getattr(importlib.import_module(module), function)(stage.config, inputs, folder / stage.id, StageContext())


def of_the_base(graph: Graph) -> Graph:
    """Without what is trained."""
    *others, report = graph.stages
    inputs = {name: source for name, source in report.inputs.items() if source.startswith("base")}
    kept = [stage for stage in others if stage.id.startswith("base") or stage.kind == "prompts"]
    return Graph([*kept, replace(report, inputs={**inputs, "export/final": "base"})])


def test_a_model_on_code_and_numbers_in_one_pipeline(graph, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From data files and a random checkpoint to the rows of results.json. What it says to the accuracy prompts is put into its mouth."""
    both = {name: files[name] for name in ("human_eval", "gsm8k")}
    learnt = lessons(both)
    build_model(tmp_path / "model", learnt, untrained=True)
    tokenizer = load_tokenizer(tmp_path / "model")
    known = {tuple(template(tokenizer, messages)): answer for messages, answer in learnt}  # asked in other words, nothing would be found

    def answer(model, prompts, **_):
        said = [tokenizer(known.get(tuple(p), "Hm."))["input_ids"] + [tokenizer.eos_token_id] for p in prompts]
        return [greedy_module.GreedyAnswer(torch.tensor(ids), "eos") for ids in said]

    monkeypatch.setattr(greedy_module, "greedy_batch", answer)
    mine = write_jsonl(tmp_path / "mine.jsonl", [{"prompt": f"Say {i}."} for i in range(4)])
    settings = {"model.path": str(tmp_path / "model"), "data.source": "file", "data.path": str(mine), "data.train": 2, "data.test": 2}
    settings |= {"data.validation": 0, "distill.batch_size": 2, "evaluate.max_new_tokens": 8, "evaluate.block_sizes": [8]}
    settings |= {"evaluate.methods": ["jacobi"], "evaluate.batch_sizes": [1], "evaluate.references": [], "evaluate.speed_prompts": 2}
    benchmarks = asked(both, *both)
    benchmarks[1]["speed_prompts"] = 1
    place = tmp_path / "run"
    run_stages(of_the_base(graph(benchmarks, settings)), place, ".*")

    results = read_json(place / "report" / "results.json")
    rows = [(r["benchmark"], r["benchmark_version"], r["method"], r["prompts"], r["accuracy"], r["accuracy_prompts"]) for r in results["rows"]]
    share = pytest.approx(KNOWN / SHOWN)
    assert rows == [
        *(("mine", None, method, 2, None, 0) for method in ("ar", "jacobi")),
        *(("human_eval", 1.0, method, 2, share, SHOWN) for method in ("ar", "jacobi")),
        *(("gsm8k", 1.0, method, 1, share, SHOWN) for method in ("ar", "jacobi")),
    ]
    assert {r["model"] for r in results["rows"]} == {"base"} and all(r["equals_ar"] == 1 for r in results["rows"])
    assert results["timed_on"][0]["models"] == ["base"]
    assert "Benchmark versions: human_eval 1.0, gsm8k 1.0." in (place / "report" / "results.md").read_text()
    for name in both:  # whole, and nothing to train on
        assert [len(read_prompts(place / name / "prompts", split)) for split in ("train", "validation", "test")] == [0, 0, SHOWN]
    samples = jsonl(place / "base" / "human_eval" / "evaluate" / "samples-evalplus.jsonl")
    solved = {sample["task_id"] for sample in samples if "isqrt" in sample["solution"]}
    assert len(samples) == SHOWN and solved == {f"Tiny/{i}" for i in range(KNOWN)}
    assert not list((place / "base" / "gsm8k" / "evaluate").glob("samples-*"))
    assert json.loads((place / "base" / "gsm8k" / "evaluate" / "evaluation.json").read_text())["benchmark_version"] == 1.0
