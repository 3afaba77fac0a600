"""The door for people at home in transformers: `model.generate(**inputs, custom_generate=jacobi_generate, block_size=64)`.

transformers prepares inputs, generation config, processors and criteria; this decodes. What would change the text and cannot be
honoured is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.tokens import TokenRules


def jacobi_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    method: str = Method.mr.value,
    block_size: int = DecodingConfig.block_size,
    max_blocks: int = DecodingConfig.max_blocks,
    spawn_ratio: float = DecodingConfig.spawn_ratio,
    verification_size: int = DecodingConfig.verification_size,
    pool_size: int = DecodingConfig.pool_size,
    ngram: bool = DecodingConfig.ngram,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Long [1, L + t]: prompt and answer; greedy, what transformers' own `generate` returns. Logits processors are honoured.

    Sampling draws from transformers' distribution with other random numbers. transformers drops `streamer` and `tokenizer` on its way to
    a custom loop: pass token_streamer=STREAMER, and for stop strings stopping_criteria=[StopStringCriteria(tokenizer, strings)].
    Raises ValueError for a batch, beams, or a processor that keeps state.
    """
    if generation_config.num_beams not in (None, 1):
        raise ValueError("jacobi_generate keeps one text per prompt: pass num_beams=1")
    if input_ids.shape[0] != 1:
        raise ValueError(f"jacobi_generate decodes one prompt at a time, got a batch of {input_ids.shape[0]}")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ValueError("attention_mask: padding is not needed for one prompt; pass input_ids without it")
    criteria = StoppingCriteriaList(c for c in stopping_criteria or () if not isinstance(c, EosTokenCriteria | MaxLengthCriteria))
    config = DecodingConfig(
        method=Method(method),
        block_size=1 if method == Method.ar.value else block_size,
        max_new_tokens=generation_config.max_length - input_ids.shape[1],
        max_blocks=max_blocks,
        spawn_ratio=spawn_ratio,
        verification_size=verification_size,
        pool_size=pool_size,
        ngram=ngram,
        # the warpers are among the processors already; the caller's torch.manual_seed decides the samples, as in transformers
        temperature=1.0 if generation_config.do_sample else 0.0,
        seed=int(torch.randint(2**31, ())) if generation_config.do_sample else 0,
    )
    rules = TokenRules.of(model, eos_ids=generation_config.eos_token_id)
    answer = generate(
        model, input_ids, config, rules=rules, processors=logits_processor, stopping_criteria=criteria, streamer=token_streamer
    ).new_tokens
    return torch.cat([input_ids, answer.unsqueeze(0).to(input_ids.device)], 1)
