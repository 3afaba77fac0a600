"""`python -m pipelines.generate model=DIR prompt=...`: one prompt, decoded one token at a time and in parallel, side by side.

On a terminal both answers grow live in two columns, one decoder after the other, so that neither slows the other; elsewhere the texts
and figures are printed at the end. `prompt=-` reads stdin; `help` lists the settings. Exit code 2 for a mistake in them. Proving
equality is the doctor's job.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from jacobi_core.decoding.config import DecodingConfig, Method
from pipelines.arguments import run_tool
from pipelines.checkpoints import encode, encode_raw, load_model, load_tokenizer
from pipelines.side_by_side import Columns, Run, decode
from tasks.serving.settings import KNOBS, decoding_for
from tasks.stage import UserError, check_dtype

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNTRAINED = {"method": "mr", "block_size": DecodingConfig.block_size, "ngram": True}
AS_AR = {"method": Method.ar, "block_size": 1, "ngram": False, "drafts": 1, "auto": False}


@dataclass
class GenerateArguments:
    """python -m pipelines.generate model=DIR prompt=TEXT: greedy decoding, one token at a time and in parallel, side by side.

    Settings of the decoder that are none are the checkpoint's own: as its search found fastest, else in blocks of the size it was trained for,
    adaptively. A checkpoint that was not trained for this is decoded by mr in blocks of 64, with n-grams.
    """

    model: Annotated[str, "checkpoint folder or hub id"]
    prompt: Annotated[str, "what the user says; - reads it from stdin"]
    method: Annotated[Method | None, "jacobi, running_window, recycling, multi_block or mr; ar runs the baseline alone"] = None
    block_size: Annotated[int | None, "tokens refreshed by one forward"] = None
    max_new_tokens: Annotated[int, "cap on the answer"] = 256
    max_blocks: Annotated[int | None, "blocks in flight (multi_block, mr)"] = None
    spawn_ratio: Annotated[float | None, "share of the newest block to be right before the next one starts"] = None
    verification_size: Annotated[int | None, "chains verified in one forward: drafts, recycled and copied candidates"] = None
    pool_size: Annotated[int | None, "rejected drafts kept for recycling"] = None
    ngram: Annotated[bool | None, "also draft what followed the last tokens where they occurred before"] = None
    drafts: Annotated[int | None, "drafts refreshed side by side, the first being their consensus (not jacobi)"] = None
    auto: Annotated[bool | None, "feed only as much as pays on this machine (not jacobi)"] = None
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
        if self.method is Method.ar:
            knobs = AS_AR
        else:
            given = {name: getattr(self, name) for name in KNOBS}
            knobs = decoding_for(self.model, given | {"method": self.method and self.method.value}, untrained=UNTRAINED)
        others = {f.name: getattr(self, f.name) for f in fields(DecodingConfig) if f.name not in KNOBS}
        return DecodingConfig(**others, **knobs)


def main(argv: list[str], *, console: Console | None = None) -> int:
    """Exit code. console: where to show the answers live; by default stdout where it is a terminal."""
    return run_tool(argv, GenerateArguments, partial(_run, console=console))


def _run(arguments: GenerateArguments, *, console: Console | None) -> int:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not text:
        raise UserError("prompt: is empty; give some text")
    trust = arguments.trust_remote_code
    tokenizer = load_tokenizer(arguments.model, trust_remote_code=trust)
    ids = encode(tokenizer, [{"role": "user", "content": text}]) if arguments.chat else encode_raw(tokenizer, text)
    model = load_model(arguments.model, dtype=arguments.dtype, trust_remote_code=trust)
    try:
        _side_by_side(model, tokenizer, ids, arguments.decoding(), console or _terminal())
    except ValueError as error:  # a prompt or model the decoder refuses
        raise UserError(str(error)) from error
    return 0


def _terminal() -> Console | None:
    """stdout, where it can show something live."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console()
    return None if console.is_dumb_terminal else console


def _side_by_side(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], config: DecodingConfig, console: Console | None
) -> None:
    import torch

    from jacobi_core.decoding.equivalence import compare_with_ar
    from jacobi_core.decoding.tokens import TokenRules

    rules, prompt = TokenRules.of(model, tokenizer), torch.tensor(ids)
    name = f"{config.method.value}{'+ngram' if config.ngram else ''}, block size {config.block_size}"
    ar, parallel = Run("ar"), Run(name)
    plan = [(ar, replace(config, **AS_AR))] + [(parallel, config)] * (config.method is not Method.ar)
    with Columns(console, [run for run, _ in plan]) if console else nullcontext() as columns:
        for run, settings in plan:
            decode(run, model, tokenizer, prompt, settings, rules, columns.draw if columns else lambda: None)
    say = print if console is None else partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if config.method is Method.ar:
        if console is None:
            say(ar.text)
        say(ar.figures())
        return
    difference = compare_with_ar(model, prompt, ar.generation.new_tokens, parallel.generation.new_tokens)
    if difference is None:
        if console is None:
            say(ar.text)
        say("\nboth answers are equal, token for token")
    else:
        if console is None:
            say(f"--- ar\n{ar.text}\n--- {name}\n{parallel.text}\n---")
        at = f"token {difference.first_index} of the answer (counted from 0), where AR's two best logits are {difference.margin:.3g} apart"
        say(f"the answers differ from {at}; `python -m pipelines.doctor` tells a rounding tie from a defect")
    say(ar.figures())
    say(parallel.figures())
    say(f"speedup {parallel.tokens_per_second / ar.tokens_per_second:.2f}x")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
