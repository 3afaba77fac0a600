"""How fast decoding is, as ratios measured side by side in one process; never a test.

    python -m benchmarks.decode [results=results.json of a quickstart] [smollm2=FOLDER] [prompts=16] [json=true]

`results` brings the models minicode-base and minicode-round2, `smollm2` the imported SmolLM2-135M; without them only the random 35 M
Llama is measured. Prints a list of {"name", "model", "value"}:

overhead            our iteration / a bare forward of the same shape (block 32)
ar_vs_transformers  tokens/s of our greedy AR / of transformers' own greedy generate
mr_vs_jacobi_tpf    tokens per forward of mr / of jacobi, best over blocks 16, 32, 64 at equal block size
best_speedup        best tokens/s of any method / of our AR
batch8_vs_batch1    jacobi at block 8: tokens/s at batch 8 / at batch 1
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate, generate_batch
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.hub import load_model, load_tokenizer

NEW_TOKENS = 64
BLOCKS = (16, 32, 64)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def median_ratio(first: Callable[[Any], Any], second: Callable[[Any], Any], items: list[Any]) -> float:
    """Median over items of time(first) / time(second), interleaved, who goes first alternating; one item to warm up."""
    ratios = []
    for i, item in enumerate([items[0], *items]):
        times = {}
        for work in (first, second) if i % 2 else (second, first):
            times[work], _ = seconds(lambda work=work, item=item: work(item))
        if i:
            ratios.append(times[first] / times[second])
    return statistics.median(ratios)


def overhead(model: PreTrainedModel, prompts: list[torch.Tensor], rules: TokenRules) -> float:
    """Time of a generation of NEW_TOKENS / time of the same forwards with nothing around them."""
    config = DecodingConfig(method=Method.running_window, block_size=32, max_new_tokens=NEW_TOKENS)

    def bare(item: tuple[torch.Tensor, int]) -> None:
        prompt, forwards = item
        with torch.inference_mode():
            forward = CachedForward(model)
            for step in range(forwards):
                width = config.block_size if step else len(prompt) + config.block_size - 1
                forward(torch.zeros(1, width, dtype=torch.long), keep=config.block_size)
                forward.rollback(len(prompt) + step)

    def ours(item: tuple[torch.Tensor, int]) -> None:
        generate(model, item[0], config, rules=rules)

    return median_ratio(ours, bare, [(p, generate(model, p, config, rules=rules).stats.forwards) for p in prompts])


def ar_vs_transformers(model: PreTrainedModel, prompts: list[torch.Tensor], rules: TokenRules) -> float:
    config = DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=NEW_TOKENS)
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.0, "eos_token_id": sorted(rules.eos_ids) or None}

    def theirs(prompt: torch.Tensor) -> None:
        type(model).generate(model, prompt[None], attention_mask=torch.ones_like(prompt)[None], **settings)

    return 1 / median_ratio(lambda p: generate(model, p, config, rules=rules), theirs, prompts)


def methods(model: PreTrainedModel, prompts: list[torch.Tensor], rules: TokenRules) -> dict[str, float]:
    """TPF and TPS totals of every method and block size, interleaved prompt by prompt."""
    shared = {"max_new_tokens": NEW_TOKENS}
    configs = {"ar": DecodingConfig(method=Method.ar, block_size=1, **shared)}
    for n in BLOCKS:
        for method in (Method.jacobi, Method.running_window, Method.mr):
            configs[f"{method.value}@{n}"] = DecodingConfig(method=method, block_size=n, **shared)
            configs[f"{method.value}+ngram@{n}"] = DecodingConfig(method=method, block_size=n, ngram=True, **shared)
    spent, tokens, forwards = dict.fromkeys(configs, 0.0), dict.fromkeys(configs, 0), dict.fromkeys(configs, 0)
    for i, prompt in enumerate([prompts[0], *prompts]):
        for name, config in configs.items():
            took, found = seconds(lambda config=config, prompt=prompt, i=i: generate(model, prompt, config, rules=rules, prompt_id=i))
            if i:
                spent[name] += took
                tokens[name] += found.stats.tokens
                forwards[name] += found.stats.forwards
    for name in configs:
        print(f"  {name:<22} TPF {tokens[name] / forwards[name]:5.2f}  TPS {tokens[name] / spent[name]:7.1f}", file=sys.stderr)
    tpf = {name: tokens[name] / forwards[name] for name in configs}
    tps = {name: tokens[name] / spent[name] for name in configs}
    return {
        "mr_vs_jacobi_tpf": max(tpf[f"mr@{n}"] / tpf[f"jacobi@{n}"] for n in BLOCKS),
        "best_speedup": max(tps.values()) / tps["ar"],
    }


def batch8_vs_batch1(model: PreTrainedModel, prompts: list[torch.Tensor], rules: TokenRules) -> float:
    config = DecodingConfig(method=Method.jacobi, block_size=8, max_new_tokens=NEW_TOKENS)
    ids = [p.tolist() for p in prompts[:8]]
    return median_ratio(
        lambda batch: [generate(model, torch.tensor(p), config, rules=rules, prompt_id=i) for i, p in enumerate(batch)],
        lambda batch: generate_batch(model, batch, config, rules=rules),
        [ids, ids, ids],
    )


def random_llama() -> PreTrainedModel:
    """35 M parameters, 8 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, eos_token_id=None
    )
    return LlamaForCausalLM(config).eval()


def models(arguments: dict[str, str]) -> dict[str, tuple[PreTrainedModel, TokenRules, list[torch.Tensor]]]:
    """label -> model, rules, prompts."""
    count = int(arguments.get("prompts", "16"))
    generator = torch.Generator().manual_seed(0)
    llama = random_llama()
    found = {"llama-35M": (llama, TokenRules.of(llama), [torch.randint(0, 8192, (48,), generator=generator) for _ in range(count)])}
    if "results" in arguments:
        from tasks.base_model.stage import PROVENANCE
        from tasks.problem_sets.minicode import generate as problems

        final = Path(json.loads(Path(arguments["results"]).read_text())["final_model"])
        base = next(p.parent for p in final.parent.glob(f"base-*/{PROVENANCE}") if (p.parent / "manifest.json").exists())
        for label, folder in (("minicode-base", base), ("minicode-round2", final)):
            found[label] = _trained(folder, [p.prompt for p in problems(split="test", count=count, seed=0)])
    if "smollm2" in arguments:
        texts = [f"Write a Python function that returns the {i + 2}th power of a number." for i in range(count)]
        found["SmolLM2-135M"] = _trained(Path(arguments["smollm2"]), texts)
    return found


def _trained(folder: Path, texts: list[str]) -> tuple[PreTrainedModel, TokenRules, list[torch.Tensor]]:
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    return model, TokenRules.of(model, tokenizer), [torch.tensor(i) for i in ids]


def main(arguments: dict[str, str]) -> None:
    rows = []
    for label, (model, rules, prompts) in models(arguments).items():
        print(label, file=sys.stderr)
        values = {"overhead": overhead(model, prompts, rules), "ar_vs_transformers": ar_vs_transformers(model, prompts, rules)}
        values |= methods(model, prompts, rules)
        values["batch8_vs_batch1"] = batch8_vs_batch1(model, prompts, rules)
        rows += [{"name": name, "model": label, "value": round(value, 3)} for name, value in values.items()]
    if arguments.get("json") == "true":
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(f"{row['model']:<16} {row['name']:<20} {row['value']:.3f}" for row in rows))


if __name__ == "__main__":
    main(dict(argument.split("=", 1) for argument in sys.argv[1:]))
