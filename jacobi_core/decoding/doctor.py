"""Is decoding lossless here: this model, this machine, these prompts? And what would make a comparison with transformers unfair?

Every method is held against a bare loop that shares no code with the decoder. Loads nothing, prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.equivalence import compare_with_ar
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.tokens import TokenRules, eos_id_set

# What transformers' generate() takes from a checkpoint's generation config, also with do_sample=False, and greedy decoding does not:
# name -> values without effect (None always is).
UNFAIR = {
    "do_sample": (False,),
    "num_beams": (1,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1, 1.0),
    "watermarking_config": (),
    "stop_strings": (),
    "max_time": (),
}


@dataclass(frozen=True)
class Finding:
    """One answer that is not greedy AR's. prompt: its index; tolerance: widest margin that counts as a tie in this dtype."""

    prompt: int
    method: str
    block_size: int
    first_index: int
    margin: float
    tolerance: float
    kind: str  # "tie" or "defect"


@dataclass
class Certificate:
    """What comparing every method with greedy AR found in one dtype."""

    dtype: str
    runs: dict[str, int] = field(default_factory=dict)  # answers compared, by "method/block size"
    equal: dict[str, int] = field(default_factory=dict)  # of these, equal to greedy AR's token for token
    findings: list[Finding] = field(default_factory=list)

    @property
    def equal_share(self) -> float:
        return sum(self.equal.values()) / sum(self.runs.values())

    @property
    def defects(self) -> list[Finding]:
        return [f for f in self.findings if f.kind == "defect"]


def method_configs(block_sizes: Sequence[int], max_new_tokens: int) -> list[tuple[str, DecodingConfig]]:
    """Our AR, and every parallel method at every block size; mr also with n-gram copies, several drafts and adaptive width. Raises
    ValueError for a size below 1."""
    found = [(Method.ar.value, DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=max_new_tokens))]
    for size in block_sizes:
        for method in Method:
            if method is not Method.ar:
                found.append((method.value, DecodingConfig(method=method, block_size=size, max_new_tokens=max_new_tokens)))
        mr = DecodingConfig(method=Method.mr, block_size=size, max_new_tokens=max_new_tokens)
        found.append(("mr+ngram", replace(mr, ngram=True)))
        found.append(("mr+ngram+drafts", replace(mr, ngram=True, drafts=2)))
        found.append(("mr+ngram+auto", replace(mr, ngram=True, auto=True)))
    return found


def certify(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    configs: Sequence[tuple[str, DecodingConfig]],
    *,
    rules: TokenRules,
    progress: Callable[[str], None] = lambda line: None,
) -> Certificate:
    """Decodes every prompt with every named config, in the model's own dtype, and compares with greedy AR.

    In fp64 any difference is a defect; in lower precision one whose top-2 margin is within `tie_margin` is a tie. An answer that
    ends too early or goes on too long is a defect in every dtype. progress: called with one line per config.
    Raises ValueError for no prompts, and where `generate` does (a text longer than the context, a cache that cannot be rolled back).
    """
    if not prompts:
        raise ValueError("prompts: none to decode")
    certificate = Certificate(str(model.dtype).removeprefix("torch."))
    ids = [torch.tensor(prompt) for prompt in prompts]
    caps = {config.max_new_tokens for _, config in configs}
    references = {cap: [plain_greedy(model, each, max_new_tokens=cap, eos_ids=rules.eos_ids) for each in ids] for cap in caps}
    for method, config in configs:
        name = f"{method}/{config.block_size}"
        found = []
        for i, prompt in enumerate(ids):
            tokens = generate(model, prompt, config, rules=rules, prompt_id=i).new_tokens
            finding = _compare(model, prompt, references[config.max_new_tokens][i], tokens, where=(i, method, config.block_size))
            found += [finding] if finding else []
        certificate.findings += found
        certificate.runs[name] = len(ids)
        certificate.equal[name] = len(ids) - len(found)
        progress(f"{certificate.dtype} {name}: {len(ids) - len(found)} of {len(ids)} equal")
    return certificate


def _compare(model: PreTrainedModel, prompt: torch.Tensor, ar: torch.Tensor, tokens: torch.Tensor, *, where: tuple[int, str, int]) -> Finding | None:
    difference = compare_with_ar(model, prompt, ar, tokens)
    if difference is None:
        return None
    return Finding(*where, difference.first_index, difference.margin, difference.tolerance, difference.kind)


@torch.inference_mode()
def plain_greedy(model: PreTrainedModel, prompt: torch.Tensor, *, max_new_tokens: int, eos_ids: frozenset[int]) -> torch.Tensor:
    """Greedy AR answer, long [t], of a prompt [L] by the shortest loop there is: the witness, so it shares nothing with `generate`."""
    cache, fed, answer = DynamicCache(config=model.config), prompt.unsqueeze(0), []
    while len(answer) < max_new_tokens and not (answer and answer[-1] in eos_ids):
        logits = model(input_ids=fed.to(model.device), cache=cache, use_cache=True, logits_to_keep=1).logits
        answer.append(int(logits[0, -1].argmax()))
        fed = torch.tensor([answer[-1:]])
    return torch.tensor(answer)


def eos_sources(model: PreTrainedModel, tokenizer: Any = None) -> dict[int, list[str]]:
    """Every id that ends a text, and where it comes from: tokenizer, generation_config, config."""
    sources = {
        "tokenizer": tokenizer.eos_token_id if tokenizer is not None else None,
        "generation_config": getattr(model.generation_config, "eos_token_id", None),
        "config": getattr(model.config.get_text_config(), "eos_token_id", None),
    }
    ids = {name: eos_id_set(source) for name, source in sources.items()}
    return {i: [name for name in ids if i in ids[name]] for i in sorted(frozenset().union(*ids.values()))}


def unfair_settings(config: GenerationConfig) -> list[str]:
    """One line per setting that makes transformers' generate() with this config decode something else than greedy AR."""
    found = []
    for name, neutral in UNFAIR.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            reset = f"pass {name}={neutral[0]}" if neutral else "reset it"
            found.append(f"generation_config.{name}={value} is applied by transformers' generate() and not here; {reset} to compare the two")
    return found
