"""The authors' released MR decoder, driven on this machine's CPU; run by the Python of its own environment, never imported by this project.

    PY benchmarks/released_runner.py DIR < jobs > answers

DIR is a checkout of the released repository; PY needs torch and transformers 4.53, as its decoder reads a cache of that version. Each line of
stdin is a job, each line of stdout its answer, so that a caller may keep the process and take turns with it:

job     {"model": folder of a Qwen2 checkpoint, "prompts": [[token id]], "max_new_tokens": int, "eos_ids": [the tokenizer's, other ones],
        "pad_id": int, "block_sizes": [int], "threads": int, "knobs": {} (other keywords of its decoder; left out: its own defaults)}
answer  {"blocks": {block size: [run]}, "ar": [run]}, one run a prompt: {"tokens": [id], "seconds", "forwards", "stop": "eos" or "cap"}

"ar" is greedy generate() of its transformers, which is also its AR baseline. Every prompt is decoded twice from the same seed: first to warm
up and to count forwards (calls of the output head, prefill included), then on the clock with no hook. seconds covers prefill, as forwards does.
tokens end at the first EOS or at the cap; work it did beyond the cap stays in seconds and forwards, so compare runs whose stop is "eos".

What is put in its way, in this process only: nothing is printed, an absent einops (imported, unused) is an empty module, and its attention
mask, which off flash-attention hides the newest keys (its text is then wrong), is the plain causal one, sliced from a table made beforehand.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM
from transformers import __version__ as transformers_version

DECODER = "modeling.cllm2_qwen2_modeling_kv_terminate_on_eos_improved_multiblock_lookahead_unified"


@lru_cache
def load_decoder(repository: str) -> types.ModuleType:
    """The released module, imported from where it lies. Raises SystemExit where it is not there or transformers is not the one it needs."""
    if not transformers_version.startswith("4.53."):
        raise SystemExit(
            f"transformers {transformers_version}: the released decoder needs 4.53; run this file with the Python of such an environment"
        )
    if not (Path(repository) / (DECODER.replace(".", "/") + ".py")).is_file():
        raise SystemExit(f"{repository}: no {DECODER.replace('.', '/')}.py in it; DIR must be a checkout of the released repository")
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = types.ModuleType("einops")
        sys.modules["einops"].rearrange = None
    sys.path.insert(0, repository)
    module = importlib.import_module(DECODER)
    module.print = lambda *parts, **settings: None
    return module


def use_plain_causal_mask(decoder: types.ModuleType, longest: int) -> None:
    """Lets the decoder attend to all of its past, at the price of a slice. longest: most keys a query can have."""
    table = torch.full((longest, longest), torch.finfo(torch.float32).min).triu_(1)[None, None]

    def create_causal_mask(*, cache_position: torch.Tensor, past_key_values: Any, **others: Any) -> torch.Tensor | None:
        past, queries = past_key_values.get_seq_length(), cache_position.shape[0]
        if past == 0 or queries == 1:
            return None  # SDPA's own causal rule, and no rule at all
        return table[:, :, past : past + queries, : past + queries]

    decoder.create_causal_mask = create_causal_mask


@lru_cache
def load_model(folder: str) -> PreTrainedModel:
    """A checkpoint as an older transformers reads it: fp32, SDPA. Raises SystemExit for a model its decoder is not made for."""
    config = json.loads((Path(folder) / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or {}
    if config["model_type"] != "qwen2" or config.get("use_sliding_window") or rope.get("rope_type", "default") != "default":
        raise SystemExit(f"{folder}: the released decoder is run for Qwen2 without sliding window or RoPE scaling; config.json says otherwise")
    config |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    config["torch_dtype"] = config.pop("dtype", config.get("torch_dtype"))
    with tempfile.TemporaryDirectory() as copy:
        (Path(copy) / "config.json").write_text(json.dumps(config))
        for weights in Path(folder).glob("*.safetensors*"):
            (Path(copy) / weights.name).symlink_to(weights.resolve())
        return Qwen2ForCausalLM.from_pretrained(copy, torch_dtype=torch.float32, attn_implementation="sdpa").eval()


def released(model: PreTrainedModel, decoder: types.ModuleType, prompt: torch.Tensor, block_size: int, job: dict[str, Any]) -> list[int]:
    """New tokens of one prompt [1, P], block by block until an EOS or the cap; drafts start as random tokens of the text so far."""
    call = {
        "n_token_seq_len": block_size,
        "use_cache": True,
        "eos_token_id": job["eos_ids"][0],
        "pad_token_id": job["pad_id"],
        **job.get("knobs", {}),
    }
    step = decoder.jacobi_forward_greedy_multiblock

    def draw(text: torch.Tensor, count: int) -> torch.Tensor:
        return text[:, torch.randint(text.shape[1], (count,))]

    first = torch.cat((prompt, draw(prompt, block_size)), dim=-1)
    cache, _, block, _ = step(model, input_ids=first, past_key_values=None, prefill_phase=True, **call)
    text, stops = prompt, set(job["eos_ids"])
    while True:
        cache, following, accepted, _ = step(model, input_ids=block, past_key_values=cache, prefill_phase=False, **call)
        assert accepted.shape[1], "the released decoder accepted nothing"
        text = torch.cat((text, accepted), dim=-1)
        if text.shape[1] - prompt.shape[1] >= job["max_new_tokens"] or not stops.isdisjoint(accepted[0].tolist()):
            return text[0, prompt.shape[1] :].tolist()
        block = torch.cat((following.view(1, 1), draw(text, block_size - 1)), dim=-1)


def greedy(model: PreTrainedModel, prompt: torch.Tensor, job: dict[str, Any]) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": job["max_new_tokens"], "eos_token_id": job["eos_ids"], "pad_token_id": job["pad_id"]}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, prompt.shape[1] :].tolist()


def measure(model: PreTrainedModel, work: Callable[[], list[int]], job: dict[str, Any]) -> dict[str, Any]:
    """One run: counted while warming up, then timed."""
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    torch.manual_seed(0)
    hook = model.lm_head.register_forward_pre_hook(count)
    counted = work()
    hook.remove()
    torch.manual_seed(0)
    start = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - start
    assert found == counted, "two decodings of a prompt from one seed differ"
    tokens = found[: job["max_new_tokens"]]
    end = next((i for i, token in enumerate(tokens) if token in job["eos_ids"]), None)
    tokens = tokens if end is None else tokens[: end + 1]
    return {"tokens": tokens, "seconds": seconds, "forwards": forwards, "stop": "cap" if end is None else "eos"}


def answer(repository: str, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    model, decoder = load_model(job["model"]), load_decoder(repository)
    prompts = [torch.tensor([prompt]) for prompt in job["prompts"]]
    # its blocks end past the cap, by those in flight at most
    use_plain_causal_mask(decoder, max(p.shape[1] for p in prompts) + job["max_new_tokens"] + 8 * max(job["block_sizes"]))

    def runs(decode: Callable[[torch.Tensor], list[int]]) -> Iterator[dict[str, Any]]:
        return (measure(model, lambda prompt=prompt: decode(prompt), job) for prompt in prompts)

    with torch.inference_mode():
        blocks = {n: list(runs(lambda prompt, n=n: released(model, decoder, prompt, n, job))) for n in job["block_sizes"]}
        return {"blocks": blocks, "ar": list(runs(lambda prompt: greedy(model, prompt, job)))}


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(sys.argv[1], json.loads(line))), file=answers, flush=True)
