"""`experiment=convert` from outside, end to end, on a tiny Llama and a user's own prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.tasks.tiny_stage import CONTEXT_LENGTH, build_base, build_prompts

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ (a random Llama of 2 layers whose answers end here and there) and prompts.jsonl."""
    folder = tmp_path_factory.mktemp("convert")
    build_prompts(folder / "tokens")
    build_base(folder / "model", folder / "tokens" / "tokenizer", kind=LlamaConfig, tied=False)
    rows = [json.dumps({"prompt": f"Write f{i}(xs): add {i} to each number."}) for i in range(48)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def convert(place: Path, *overrides: str) -> str:
    """Its stdout."""
    settings = [f"model.path={place}/model", f"data.path={place}/prompts.jsonl", "data.test=8", "data.max_prompt_tokens=64"]
    small = ["evaluate.speed_prompts=2", "evaluate.batch_sizes=[1]", "evaluate.references=[]", "evaluate.accuracy_prompts=4", "distill.probe.every=0"]
    places = [f"paths.outputs={place}/out", f"paths.store={place}/store", f"paths.results={place}/results.json"]
    command = [sys.executable, "-m", "pipelines.full_run", "experiment=convert", *settings, *small, *places, *overrides]
    done = subprocess.run(command, cwd=place, env={**os.environ}, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_llama_and_a_file_of_prompts_become_a_decoder(place: Path):
    printed = convert(place, "distill.max_steps=3", "noise_schedule=random")
    # 1. measured first, then what was fitted and what it costs, before anything else runs
    order = ["answers to a few prompts are measured first", "fitted to the model's answers:", "trajectories.max_new_tokens", "GPU-hours", "to run:"]
    at = [printed.index(text) for text in order]
    assert at == sorted(at)
    assert "set by you" in next(line for line in printed.splitlines() if line.strip().startswith("noise_schedule"))
    # 2. what ran is what was printed, and it is recorded
    results = json.loads((place / "results.json").read_text())
    models = {row["model"] for row in results["rows"]}
    assert models == {"base", "round1", "round2"}
    assert all(row["equals_ar"] == 1.0 for row in results["rows"] if row["method"] == "jacobi")
    record = json.loads(next((place / "out" / "runs").rglob("job.json")).read_text())
    lengths = json.loads(next((place / "store").glob("answer_lengths-*/answer_lengths.json")).read_text())
    recorded = record["config"]
    assert f"{len(lengths['answer_tokens'])} measured answers" in printed
    assert recorded["trajectories"]["max_new_tokens"] <= CONTEXT_LENGTH - 64
    median = sorted(lengths["answer_tokens"])[len(lengths["answer_tokens"]) // 2]
    assert all(r["window"] <= max(1, median // r["block_size"]) for r in recorded["rounds"])
    assert "rounds.0.block_size " in printed and str(recorded["rounds"][0]["block_size"]) in printed
    # 3. again: nothing is measured, nothing runs
    again = convert(place, "distill.max_steps=3", "noise_schedule=random")
    assert "measured first" not in again and "everything is there: nothing to run" in again


@pytest.mark.slow
def test_measuring_alone_then_the_cost(place: Path):
    folder = place / "alone"
    folder.mkdir()
    stores = [f"paths.store={folder}/store", f"paths.outputs={folder}/out"]
    before = convert(place, "dry_run=true", *stores)
    assert "have not been measured" in before
    convert(place, "until=answer_lengths", *stores)
    after = convert(place, "dry_run=true", *stores)
    assert "fitted to the model's answers" in after and "(measured on a few)" in after
    assert [line.split()[1] for line in after.splitlines() if line.startswith("answer_lengths")] == ["cached"]
