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
from jacobi_core.decoding.generate import generate, generate_batch
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
    """Long [B, L + t]: prompts (left-padded) and answers; greedy, what transformers' own `generate` returns. Logits processors are honoured.

    Sampling draws from transformers' distribution with other random numbers. transformers drops `streamer` and `tokenizer` on its way to
    a custom loop: pass token_streamer=STREAMER, and for stop strings stopping_criteria=[StopStringCriteria(tokenizer, strings)].
    Raises ValueError for beams, a streamed batch, or a processor that keeps state.
    """
    if generation_config.num_beams not in (None, 1):
        raise ValueError("jacobi_generate keeps one text per prompt: pass num_beams=1")
    if token_streamer is not None and input_ids.shape[0] != 1:
        raise ValueError(f"token_streamer: a stream shows one text, got a batch of {input_ids.shape[0]}")
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
    more = {"rules": rules, "processors": logits_processor, "stopping_criteria": criteria}
    mask = model_kwargs.get("attention_mask")
    prompts = [row if mask is None else row[keep.bool()] for row, keep in zip(input_ids, input_ids if mask is None else mask, strict=True)]
    if len(prompts) == 1:
        answers = [generate(model, prompts[0], config, streamer=token_streamer, **more).new_tokens]
    else:
        answers = [g.new_tokens for g in generate_batch(model, prompts, config, **more)]
    padding = generation_config.pad_token_id if generation_config.pad_token_id is not None else max(rules.eos_ids, default=0)
    padded = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=padding)
    return torch.cat([input_ids, padded.to(input_ids.device)], 1)
