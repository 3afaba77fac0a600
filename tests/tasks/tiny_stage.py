"""Small inputs of the stages: hand-made trajectories, a random base model, prompts, and trajectory shards collected without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, Qwen2Config

from jacobi_core.hub import load_tokenizer, save_checkpoint
from jacobi_core.trajectories.record import Trajectory
from tasks import artifacts
from tasks.artifacts import Prompt, prompt_id
from tasks.base_model.tokenizer import train_tokenizer
from tasks.export_model import PROVENANCE
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
from tasks.generate_trajectories.stage import make_job
from tasks.generate_trajectories.worker import ShardWorker
from tasks.prepare_prompts import template
from tasks.problem_sets.problem import Problem
from tasks.stage import StageContext

CONTEXT_LENGTH = 256  # of the tiny base
WRONG = 1  # a token no hand-made answer holds


def hand_trajectory(identity: int, answer: Sequence[int], *, block_size: int, unconverged: Sequence[Sequence[int]], prompt=(30, 31)) -> Trajectory:
    """A trajectory whose states, per block, have the given numbers of unconverged tokens (the last one 0)."""
    states = []
    for i, counts in enumerate(unconverged):
        fixed = list(answer[i * block_size : (i + 1) * block_size])
        states.append(torch.tensor([fixed[: len(fixed) - count] + [WRONG] * count for count in counts]))
    trajectory = Trajectory(identity, torch.tensor(prompt), torch.tensor(answer), "eos", block_size, states)
    trajectory.validate()
    return trajectory


def plain(trajectory: Trajectory) -> tuple:
    """All of a trajectory as comparable values."""
    return (
        trajectory.id,
        trajectory.prompt_ids.tolist(),
        trajectory.answer_ids.tolist(),
        trajectory.stop_reason,
        trajectory.block_size,
        [states.tolist() for states in trajectory.states],
    )


def write_jsonl(path: Path, rows: Iterable[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")
    return path


def problem(number: int) -> Problem:
    """A minicode-like problem that no change of minicode changes."""
    name, words = f"add_{number}", ("each", "every", "any", "all of the")
    return Problem(
        problem_id=f"tiny/{number}",
        prompt=f"Write {name}(xs): add {number} to {words[number % 4]} number, return {'a list' if number % 2 else 'their sum'}.",
        entry_point=name,
        tests=f"assert {name}([1, 2]) == {[1 + number, 2 + number] if number % 2 else 3 + 2 * number}\n",
        solution=f"def {name}(xs):\n    return {'[' if number % 2 else 'sum('}x + {number} for x in xs{']' if number % 2 else ')'}\n",
    )


def build_prompts(folder: Path) -> None:
    """A finished `prompts` stage: 11 + 2 + 5 problems, and the tokenizer trained on them."""
    folder.mkdir(parents=True, exist_ok=True)
    problems = [problem(number) for number in range(18)]
    tokenizer = train_tokenizer([text for p in problems for text in (p.prompt, p.solution)], vocab_size=384)
    tokenizer.save_pretrained(folder / "tokenizer")
    splits = ["train"] * 11 + ["validation"] * 2 + ["test"] * 5
    prompts = []
    for split, made in zip(splits, problems, strict=True):
        messages = [{"role": "user", "content": made.prompt}]
        prompts.append(Prompt(prompt_id(messages), split, messages, template(tokenizer, messages), {"problem_set": "tiny", **asdict(made)}))
    artifacts.write_prompts(folder, prompts)


def build_base(folder: Path, tokenizer_folder: Path, *, kind: type[PretrainedConfig] = Qwen2Config, tied: bool = True) -> None:
    """A finished `base` stage: 2 random layers whose greedy text is varied, and ends here and there."""
    tokenizer = load_tokenizer(tokenizer_folder)
    torch.manual_seed(0)
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    ends = [tokenizer.eos_token_id, *range(260, len(tokenizer), 8)]  # many, so that some answer meets one
    generation = GenerationConfig(do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    save_checkpoint(AutoModelForCausalLM.from_config(config).eval(), tokenizer, folder, generation_config=generation)
    artifacts.write_json(folder / PROVENANCE, {"name": "base", "source": "random", "licence": "other", "train_tokens": 0})


def write_split(folder: Path, prompts: Sequence[Prompt]) -> Path:
    """A prompts folder without a tokenizer; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_prompts(folder, prompts)
    return folder


def collect_shards(config: GenerateTrajectoriesConfig, inputs: dict[str, Path], output: Path, shards: Iterable[int]) -> list[dict]:
    """What a Ray actor does with these shard numbers, in this process."""
    output.mkdir(parents=True, exist_ok=True)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        worker = ShardWorker(make_job(config, inputs, output, StageContext())[0])
        return [worker({"shard": [shard]}) for shard in shards]
    finally:
        torch.use_deterministic_algorithms(deterministic)
