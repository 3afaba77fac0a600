"""Decoding of one prompt, every method in one loop. Lossless: the tokens are those of AR decoding, greedy or with the same noise.

Batches are not here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.choose import Chooser, warpers
from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.stats import Generation
from jacobi_core.decoding.text import Text
from jacobi_core.decoding.tokens import TokenRules


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    config: DecodingConfig,
    *,
    rules: TokenRules | None = None,
    prompt_id: int = 0,
    processors: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: BaseStreamer | None = None,
) -> Generation:
    """Decode after input_ids, long [1, L] or [L] with L >= 1 (paper section 2.1, algorithm sections 1 and 6).

    rules: EOS and draftable ids; by default read off the model alone (pass TokenRules.of(model, tokenizer) for a padded vocabulary).
    prompt_id: keys the random first guess and the sampling noise, with config.seed.
    processors: logits processors, run before config's own warpers. Settings of the model's generation config do not apply.
    stopping_criteria: asked for every committed token, also inside a block.
    streamer: gets the prompt, then what every forward commits, never a token past a stop.
    Raises ValueError for an empty prompt, a batch, a text longer than the model's context, or a processor that keeps state.
    """
    prompt = input_ids.reshape(-1) if input_ids.dim() == 2 and input_ids.shape[0] == 1 else input_ids
    if prompt.dim() != 1 or len(prompt) == 0:
        raise ValueError(f"input_ids must hold one prompt of at least one token, got shape {tuple(input_ids.shape)}")
    check_context(model, len(prompt), config.max_new_tokens)
    forward = CachedForward(model)
    stops = None
    if stopping_criteria:

        def stops(tokens: Sequence[int]) -> bool:
            return bool(stopping_criteria(torch.tensor([tokens], device=model.device), None).any())

    text = Text(prompt, config, rules or TokenRules.of(model), prompt_id=prompt_id, stops=stops)
    processors = LogitsProcessorList([*(processors or ()), *warpers(config)])
    choose = Chooser(processors, sample=config.temperature > 0, seed=config.seed, prompt_id=prompt_id)
    if streamer is not None:
        streamer.put(prompt.cpu())
    while True:
        # 1. what may follow the committed text: the refreshed draft, and candidates beside it
        chains = text.propose()
        # 2. one forward over all of them, against one cache; one transfer to the host
        logits = forward.logits_of(text.uncached, [chain.tokens for chain in chains])
        predictions = text.read(chains, choose(logits, *text.places(chains, with_prefixes=choose.needs_prefix)))
        # 3. verify, stop at EOS or the cap, commit
        done = len(text.answer)
        verdict = text.receive(chains, predictions)
        if streamer is not None:
            streamer.put(torch.tensor(text.answer[done:]))
        if verdict is None:
            if streamer is not None:
                streamer.end()
            return Generation(torch.tensor(text.answer), text.stats)
        # 4. forget everything but the accepted branch
        choose.forget_before(len(text.answer))
        forward.keep(verdict.winner, verdict.accepted)


def check_context(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises ValueError where prompt and answer do not fit the model's context length."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise ValueError(f"prompt ({prompt_tokens} tokens) + max_new_tokens ({max_new_tokens}) exceed the model's context of {limit} tokens")
