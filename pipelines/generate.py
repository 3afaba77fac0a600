"""`python -m pipelines.generate model=DIR prompt=...`: one prompt, decoded one token at a time and in parallel, side by side.

`prompt=-` reads stdin; `help` lists the settings. Exit code 2 for a mistake in them. Proving equality is the doctor's job.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

from jacobi_core.decoding.config import DecodingConfig, Method
from pipelines.arguments import run_tool
from pipelines.checkpoints import encode, encode_raw, load_model, load_tokenizer
from tasks.stage import UserError, check_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from jacobi_core.decoding.stats import Generation
    from jacobi_core.decoding.tokens import TokenRules

AS_AR = {"method": Method.ar, "block_size": 1, "ngram": False}


@dataclass
class GenerateArguments:
    """python -m pipelines.generate model=DIR prompt=TEXT: greedy decoding, one token at a time and in parallel, side by side."""

    model: Annotated[str, "checkpoint folder or hub id"]
    prompt: Annotated[str, "what the user says; - reads it from stdin"]
    method: Annotated[Method, "jacobi, running_window, recycling, multi_block or mr; ar runs the baseline alone"] = Method.mr
    block_size: Annotated[int, "tokens refreshed by one forward"] = DecodingConfig.block_size
    max_new_tokens: Annotated[int, "cap on the answer"] = 256
    max_blocks: Annotated[int, "blocks in flight (multi_block, mr)"] = DecodingConfig.max_blocks
    spawn_ratio: Annotated[float, "share of the newest block to be right before the next one starts"] = DecodingConfig.spawn_ratio
    verification_size: Annotated[int, "drafts verified in one forward, recycled and copied ones included"] = DecodingConfig.verification_size
    pool_size: Annotated[int, "rejected drafts kept for recycling"] = DecodingConfig.pool_size
    ngram: Annotated[bool, "also draft what followed the last tokens where they occurred before"] = True
    temperature: Annotated[float, "0 is greedy; above, both decoders draw the same samples"] = DecodingConfig.temperature
    top_k: Annotated[int, "sampling: keep the k likeliest tokens; 0 keeps all"] = DecodingConfig.top_k
    top_p: Annotated[float, "sampling: keep the likeliest tokens that reach this probability together"] = DecodingConfig.top_p
    min_p: Annotated[float, "sampling: drop tokens below this share of the likeliest one's probability"] = DecodingConfig.min_p
    seed: Annotated[int, "of the random first guess and of sampling"] = DecodingConfig.seed
    chat: Annotated[bool, "through the chat template; false feeds the text as it is"] = True
    dtype: Annotated[str, "float32, bfloat16 or float64"] = "float32"
    trust_remote_code: Annotated[bool, "may the checkpoint bring its own Python code?"] = False

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype)
        self.decoding()

    def decoding(self) -> DecodingConfig:
        given = {f.name: getattr(self, f.name) for f in fields(DecodingConfig)}
        return DecodingConfig(**given | (AS_AR if self.method is Method.ar else {}))


def main(argv: list[str]) -> int:
    """Exit code."""
    return run_tool(argv, GenerateArguments, _run)


def _run(arguments: GenerateArguments) -> int:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not text:
        raise UserError("prompt: is empty; give some text")
    trust = arguments.trust_remote_code
    tokenizer = load_tokenizer(arguments.model, trust_remote_code=trust)
    ids = encode(tokenizer, [{"role": "user", "content": text}]) if arguments.chat else encode_raw(tokenizer, text)
    model = load_model(arguments.model, dtype=arguments.dtype, trust_remote_code=trust)
    try:
        _side_by_side(model, tokenizer, ids, arguments.decoding())
    except ValueError as error:  # a prompt or model the decoder refuses
        raise UserError(str(error)) from error
    return 0


def _side_by_side(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], config: DecodingConfig) -> None:
    import torch

    from jacobi_core.decoding.equivalence import compare_with_ar
    from jacobi_core.decoding.tokens import TokenRules

    rules, prompt = TokenRules.of(model, tokenizer), torch.tensor(ids)
    ar, ar_seconds = _timed(model, prompt, replace(config, **AS_AR), rules)
    if config.method is Method.ar:
        print(_said(tokenizer, ar))
        print(_figures("ar", ar, ar_seconds))
        return
    parallel, seconds = _timed(model, prompt, config, rules)
    difference = compare_with_ar(model, prompt, ar.new_tokens, parallel.new_tokens)
    name = f"{config.method.value}{'+ngram' if config.ngram else ''}, block size {config.block_size}"
    if difference is None:
        print(_said(tokenizer, ar))
        print("\nboth answers are equal, token for token")
    else:
        print(f"--- ar\n{_said(tokenizer, ar)}\n--- {name}\n{_said(tokenizer, parallel)}\n---")
        at = f"token {difference.first_index} of the answer (counted from 0), where AR's two best logits are {difference.margin:.3g} apart"
        print(f"the answers differ from {at}; `python -m pipelines.doctor` tells a rounding tie from a defect")
    print(_figures("ar", ar, ar_seconds))
    print(_figures(name, parallel, seconds))
    speedup = (parallel.stats.tokens / seconds) / (ar.stats.tokens / ar_seconds)
    print(f"speedup {speedup:.2f}x")


def _timed(model: PreTrainedModel, prompt, config: DecodingConfig, rules: TokenRules) -> tuple[Generation, float]:
    """A generation and its wall seconds, prompt included; what a first forward costs once is spent before."""
    from dataclasses import replace

    from jacobi_core.decoding.generate import generate

    generate(model, prompt, replace(config, max_new_tokens=min(2, config.max_new_tokens)), rules=rules)
    start = time.perf_counter()
    generation = generate(model, prompt, config, rules=rules)  # its tokens are on the host: nothing is left to wait for
    return generation, time.perf_counter() - start


def _said(tokenizer: PreTrainedTokenizerBase, generation: Generation) -> str:
    return tokenizer.decode(generation.new_tokens, skip_special_tokens=True)


def _figures(name: str, generation: Generation, seconds: float) -> str:
    stats = generation.stats
    accepted = sum(committed - 1 for committed in stats.committed_per_forward) / stats.forwards
    sources = ", ".join(f"{source} {count}" for source, count in stats.accepted_from.most_common())
    return (
        f"{name}: {stats.tokens} tokens, {stats.forwards} forwards, {seconds:.2f} s, {stats.tokens / seconds:.1f} tokens/s, TPF {stats.tpf:.2f}, "
        f"mean acceptance length {accepted:.2f} draft tokens, tokens by source: {sources}; stopped by {stats.stop_reason}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
