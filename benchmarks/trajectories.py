"""How fast trajectories are collected and how small they are, as ratios measured side by side in one process; never a test.

    python -m benchmarks.trajectories [--results results.json of a quickstart] [--prompts 256] [--json]

Without --results only the random 35 M Llama is measured. Prints a list of {"name", "model", "value"}:

vs_block_by_block              answer tokens/s of `collect` / of decoding one prompt at a time, block by block, every forward feeding the whole
                               block against the cached text before it, until the block stops changing (n=16)
vs_unconverged_only            the same against the form that feeds only the tokens not yet accepted, and keeps the accepted ones' keys and values
bytes_per_token_n16, _n32      bytes on disk per answer token, whole files, minicode
released_json_bytes_per_token  the same n=16 trajectories as the released code's JSON: per block the whole prefix, all states, the whole answer
scaling_1_to_2_workers         answer tokens/s of two one-thread processes / of one
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.contestants import base_and_final, random_llama, trained
from benchmarks.measure import seconds
from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.drafts import ContextDrafts
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.hub import load_model, load_tokenizer
from jacobi_core.trajectories.collect import collect
from jacobi_core.trajectories.record import Trajectory

LLAMA_TOKENS = 64  # answers of the random Llama, which never ends one


@torch.inference_mode()
def block_by_block(
    model: PreTrainedModel, prompt: Sequence[int], prompt_id: int, *, n: int, cap: int, rules: TokenRules, whole_blocks: bool
) -> list[list[list[int]]]:
    """The states of every block, decoded one after the other at batch size 1, as `collect` defines them."""
    forward = CachedForward(model)
    drafts = ContextDrafts(torch.tensor(prompt), prompt_id=prompt_id, seed=0, rules=rules, capacity=cap)
    known = int(forward(torch.tensor([prompt]), keep=1)[0, -1].argmax())  # the next block's first token
    blocks: list[list[list[int]]] = []
    for start in range(0, cap, n):
        size, base = min(n, cap - start), forward.length
        state = drafts.draw(start, size).tolist()
        states, done = [state], 0  # done: leading tokens that are final, and whose keys and values are kept
        while True:
            fed = state if whole_blocks else state[done:]
            predicted = forward(torch.tensor([fed]))[0].argmax(-1).tolist()
            first = known if whole_blocks or done == 0 else state[done]
            new = [*state[: size - len(fed)], first, *predicted[:-1]]
            agreed = next((i for i in range(size) if state[i] != new[i]), size)
            ended = next((i + 1 for i in range(agreed) if new[i] in rules.eos_ids), None)
            if agreed == size or ended or len(states) > size + 1:  # the last: near-ties that flip for ever
                break
            forward.rollback(base if whole_blocks else base + agreed)
            state, done = new, agreed
            states.append(state)
        cut = [s[:ended] for s in states]
        blocks.append(cut[: cut.index(cut[-1]) + 1])
        if ended:
            break
        known = predicted[-1]
        drafts.append(torch.tensor(state))
    return blocks


def speed(model: PreTrainedModel, prompts: list[list[int]], rules: TokenRules, *, cap: int) -> dict[str, float]:
    """Ratios of answer tokens/s, medians over rounds that take each form in turn; the slow forms get the first prompts of a round's batch."""
    n, rounds = 16, 3
    settings = {"block_size": n, "max_new_tokens": cap, "seed": 0, "rules": rules}
    batch = len(prompts) // rounds
    few = max(1, min(8, batch))
    collect(model, prompts[:2], [0, 1], **settings)
    ratios: dict[str, list[float]] = {"vs_block_by_block": [], "vs_unconverged_only": []}
    differing = compared = 0
    for turn in range(rounds):
        chosen, ids = prompts[turn * batch : (turn + 1) * batch], list(range(batch))
        spent, found = seconds(lambda chosen=chosen, ids=ids: collect(model, chosen, ids, **settings))
        ours = answer_tokens(found.trajectories) / spent
        for name, whole in (("vs_block_by_block", True), ("vs_unconverged_only", False)):
            form = {"n": n, "cap": cap, "rules": rules, "whole_blocks": whole}
            spent, theirs = seconds(lambda chosen=chosen, form=form: [block_by_block(model, p, i, **form) for i, p in enumerate(chosen[:few])])
            rate = sum(len(block[-1]) for blocks in theirs for block in blocks) / spent
            ratios[name].append(ours / rate)
            print(f"  {name}: {ours:.0f} / {rate:.0f} answer tokens/s", file=sys.stderr)
            for a, b in zip(found.trajectories, theirs, strict=False):
                compared, differing = compared + 1, differing + ([s.tolist() for s in a.states] != b)
    print(f"  {differing} of {compared} trajectories differ (fp32 near-ties); {found.disagreements} disagreements in the last round", file=sys.stderr)
    return {name: statistics.median(values) for name, values in ratios.items()}


def answer_tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(len(t.answer_ids) for t in trajectories)


def sizes(model: PreTrainedModel, prompts: list[list[int]], rules: TokenRules) -> dict[str, float]:
    from tasks.trajectory_files import write_trajectories

    values = {}
    for n in (16, 32):
        found = collect(model, prompts, list(range(len(prompts))), block_size=n, max_new_tokens=128, seed=0, rules=rules).trajectories
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "part.parquet")
            write_trajectories(path, found)
            values[f"bytes_per_token_n{n}"] = path.stat().st_size / answer_tokens(found)
        if n == 16:
            values["released_json_bytes_per_token"] = len(json.dumps(released_form(found))) / answer_tokens(found)
    return values


def released_form(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """The records of the released code: one per block, with everything before it, its states and the whole text."""
    records = []
    for t in trajectories:
        text = [*t.prompt_ids.tolist(), *t.answer_ids.tolist()]
        for i, states in enumerate(t.states):
            before = text[: len(t.prompt_ids) + i * t.block_size]
            names = {"diffusion_itr_id": f"itr_{i}", "data_id": f"bucket_0_data_{t.id}"}
            records.append(names | {"prompt_ids": [before], "answer_trajectory_ids": states.tolist(), "teacher_output_ids": text})
    return records


def _worker(folder: str, prompts: list[list[int]], ready: Any, go: Any, result: Any) -> None:
    torch.set_num_threads(1)
    model = load_model(folder)
    settings = {"block_size": 16, "max_new_tokens": 128, "seed": 0, "rules": TokenRules.of(model, load_tokenizer(folder))}
    collect(model, prompts[:2], [0, 1], **settings)
    ready.release()
    go.wait()
    spent, found = seconds(lambda: collect(model, prompts, list(range(len(prompts))), **settings))
    result.put((answer_tokens(found.trajectories), spent))


def scaling(folder: Path, prompts: list[list[int]]) -> float:
    """Answer tokens/s of two processes that halve the prompts / of one that has half of them; loading a model is not counted."""
    context = multiprocessing.get_context("spawn")
    half = len(prompts) // 2

    def rate(parts: list[list[list[int]]]) -> float:
        ready, go, result = context.Semaphore(0), context.Event(), context.Queue()
        workers = [context.Process(target=_worker, args=(str(folder), part, ready, go, result)) for part in parts]
        for worker in workers:
            worker.start()
        for _ in workers:
            ready.acquire()
        go.set()
        rates = [result.get() for _ in workers]
        for worker in workers:
            worker.join()
        return sum(tokens for tokens, _ in rates) / max(spent for _, spent in rates)

    one = rate([prompts[:half]])
    return rate([prompts[:half], prompts[half:]]) / one


def main(arguments: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)
    llama = random_llama(1).model
    few = [torch.randint(0, 8192, (int(length),), generator=generator).tolist() for length in torch.randint(24, 72, (192,), generator=generator)]
    print("llama-35M", file=sys.stderr)
    values = {"llama-35M": speed(llama, few, TokenRules.of(llama), cap=LLAMA_TOKENS)}
    del llama
    if arguments.results:
        from tasks.problem_sets.minicode import generate as problems

        folder, _ = base_and_final(arguments.results)
        base = trained("minicode-base", folder, [p.prompt for p in problems(split="train", count=arguments.prompts, seed=0)])
        prompts = [prompt.tolist() for prompt in base.prompts]
        print("minicode-base", file=sys.stderr)
        found = speed(base.model, prompts, base.rules, cap=128)
        found |= sizes(base.model, prompts, base.rules)
        found["scaling_1_to_2_workers"] = scaling(folder, prompts)
        values["minicode-base"] = found
    rows = [{"name": name, "model": label, "value": round(value, 3)} for label, named in values.items() for name, value in named.items()]
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(f"{row['model']:<16} {row['name']:<30} {row['value']:.3f}" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", help="results.json of a quickstart")
    parser.add_argument("--prompts", type=int, default=768, help="of minicode")
    parser.add_argument("--json", action="store_true")
    main(parser.parse_args())
