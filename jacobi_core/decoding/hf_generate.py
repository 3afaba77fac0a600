"""The door for people at home in transformers: `model.generate(**inputs, custom_generate=jacobi_generate, block_size=64)`.

transformers prepares inputs, generation config, processors and criteria; this decodes. What cannot be honoured is refused by name,
never ignored, as far as it gets here: transformers 5.24 keeps `streamer`, `tokenizer` and `assistant_model` from a custom loop.
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerateDecoderOnlyOutput,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from jacobi_core.decoding.batch import BatchForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.forwards import pace_of
from jacobi_core.decoding.generate import Row, check_context, decode_rows, generate
from jacobi_core.decoding.kept_forwards import borrowed_forward
from jacobi_core.decoding.tokens import TokenRules, eos_id_set

_OTHER_LOOPS = {  # settings that make transformers decode in another way, and what to do instead
    "num_beams": "jacobi_generate keeps one text per prompt: pass num_beams=1",
    "prompt_lookup_num_tokens": "pass ngram=True instead: drafts from the text so far are one of this decoder's own sources",
    "assistant_early_exit": "leave it out: drafts come from the model itself",
    "use_mtp": "leave it out: drafts come from the model itself",
    "penalty_alpha": "contrastive search is another decoder: leave it out",
    "dola_layers": "DoLa is another decoder: leave it out",
    "constraints": "constrained beam search is another decoder: leave it out",
    "force_words_ids": "constrained beam search is another decoder: leave it out",
    "prefill_chunk_size": "the prompt is read in one forward: leave it out",
}
_UNSET = {"num_beams": (None, 1), "use_mtp": (None, False), "penalty_alpha": (None, 0.0)}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_HANDLED = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states"}
_KNOW_THEIR_ROW = (PrefixConstrainedLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor)


def jacobi_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    method: str = Method.mr.value,
    block_size: int = DecodingConfig.block_size,
    max_blocks: int = DecodingConfig.max_blocks,
    spawn_ratio: float = DecodingConfig.spawn_ratio,
    verification_size: int = DecodingConfig.verification_size,
    pool_size: int = DecodingConfig.pool_size,
    ngram: bool = DecodingConfig.ngram,
    drafts: int = DecodingConfig.drafts,
    auto: bool = DecodingConfig.auto,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Long [B, L + t]: prompts (left-padded) and answers; greedy, what transformers' own `generate` returns, in its output class where
    return_dict_in_generate is set. Logits processors, stopping criteria and end-of-text ids are honoured.

    Sampling draws from transformers' distribution with other random numbers. transformers drops `streamer`, `tokenizer` and
    `assistant_model` on its way to a custom loop: pass token_streamer=STREAMER, for stop strings
    stopping_criteria=[StopStringCriteria(tokenizer, strings)], and no assistant.
    Raises ValueError, by name, for what cannot be honoured: beams and other decoders, scores and other outputs, a cache or embeddings
    of the caller's, use_cache=False, inputs besides the tokens, a streamed batch, a processor that keeps state.
    """
    _refuse_settings(generation_config, model_kwargs)
    keep = torch.ones_like(input_ids) if model_kwargs.get("attention_mask") is None else model_kwargs["attention_mask"]
    keep = keep.bool()
    _refuse_inputs(input_ids, keep, logits_processor, token_streamer, model_kwargs)
    config = DecodingConfig(
        method=Method(method),
        block_size=1 if method == Method.ar.value else block_size,
        max_new_tokens=stopping_criteria.max_length - input_ids.shape[1],
        max_blocks=max_blocks,
        spawn_ratio=spawn_ratio,
        verification_size=verification_size,
        pool_size=pool_size,
        ngram=ngram,
        drafts=drafts,
        auto=auto,
        # the warpers are among the processors already; the caller's torch.manual_seed decides the samples, as in transformers
        temperature=1.0 if generation_config.do_sample else 0.0,
        seed=int(torch.randint(2**31, ())) if generation_config.do_sample else 0,
    )
    eos_ids = eos_id_set(*(c.eos_token_id for c in stopping_criteria if isinstance(c, EosTokenCriteria)))
    rules = replace(TokenRules.of(model, eos_ids=eos_ids), eos_ids=eos_ids)  # here those of the call alone end a text
    criteria = StoppingCriteriaList(c for c in stopping_criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria))
    more = {"rules": rules, "streamer": token_streamer}
    if len(input_ids) == 1 and keep.all():
        check_context(model, input_ids.shape[1], config.max_new_tokens)  # before a cache of that size is made
        with borrowed_forward(model, config, input_ids.shape[1] + config.max_new_tokens) as forward:
            found = [generate(model, input_ids, config, processors=logits_processor, stopping_criteria=criteria, forward=forward, **more)]
    else:  # processors and criteria see the padding, as transformers shows it to them
        pace = pace_of(model, config, rows=len(input_ids))
        rows = [
            Row.make(
                model,
                row[kept],
                config,
                prompt_id=i,
                processors=_of_row(logits_processor, i),
                stopping_criteria=_RowCriteria(criteria, rows=len(input_ids)),
                padding=row[~kept].tolist(),
                pace=pace,
                **more,
            )
            for i, (row, kept) in enumerate(zip(input_ids, keep, strict=True))
        ]
        one = borrowed_forward(model, config, rows[0].capacity) if len(rows) == 1 else nullcontext(BatchForward(model, len(rows)))
        with one as forward:
            found = decode_rows(forward, rows)
    padding = generation_config.pad_token_id if generation_config.pad_token_id is not None else max(eos_ids, default=0)
    padded = torch.nn.utils.rnn.pad_sequence([g.new_tokens for g in found], batch_first=True, padding_value=padding)
    sequences = torch.cat([input_ids, padded.to(input_ids.device)], 1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """They are called with one row at a time; the repetition penalty may have come with the length of every row's padding."""
    found = LogitsProcessorList()
    for p in processors:
        by_row = isinstance(p, RepetitionPenaltyLogitsProcessor) and isinstance(p.prompt_ignore_length, torch.Tensor)
        found.append(RepetitionPenaltyLogitsProcessor(p.penalty, p.prompt_ignore_length[row : row + 1]) if by_row else p)
    return found


class _RowCriteria(StoppingCriteriaList):
    """A batch's criteria for one of its rows. Some (lm-eval's) expect every row at every call and remember which of them have ended: this
    row gets copies of its own, and they see it in the place of every row."""

    def __init__(self, criteria: StoppingCriteriaList, *, rows: int) -> None:
        super().__init__(copy(criterion) for criterion in criteria)
        for criterion in self:
            vars(criterion).update({name: copy(value) for name, value in vars(criterion).items() if isinstance(value, list | dict | set)})
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        return super().__call__(input_ids.expand(self._rows, -1), scores, **kwargs)


def _refuse_settings(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    for name, remedy in _OTHER_LOOPS.items():
        value = getattr(config, name, None)
        if value not in _UNSET.get(name, (None,)):
            raise ValueError(f"{name}={value}: {remedy}")
    asked = [name for name in _OUTPUTS if getattr(config, name)]
    if config.return_dict_in_generate and asked:  # without it transformers returns none of them either
        raise ValueError(f"{', '.join(asked)}: parallel decoding returns sequences only; leave it out")
    if config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        raise ValueError(f"cache_implementation={config.cache_implementation!r}: the decoder keeps its own cache; leave it out")
    if model_kwargs.get("use_cache") is False:
        raise ValueError("use_cache=False: parallel decoding needs a cache; leave it out")
    if getattr(model_kwargs.get("cache"), "_is_user_defined", False):  # transformers always hands over a cache, and marks the caller's
        raise ValueError("cache (past_key_values): the decoder keeps its own; leave it out and pass the whole text as input_ids")
    unknown = sorted(name for name, value in model_kwargs.items() if name not in _HANDLED and value is not None and value is not False)
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: only tokens (input_ids, attention_mask) can be decoded; leave it out")


def _refuse_inputs(
    input_ids: torch.Tensor,
    keep: torch.Tensor,
    processors: LogitsProcessorList,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> None:
    rows = len(input_ids)
    if streamer is not None and rows != 1:
        raise ValueError(f"token_streamer: a stream shows one text, got a batch of {rows}")
    batched = [type(p).__name__ for p in processors if isinstance(p, _KNOW_THEIR_ROW)]
    if batched and rows > 1:
        raise ValueError(f"{', '.join(batched)}: tells the rows of a batch apart; pass one prompt per call")
    positions = model_kwargs.get("position_ids")
    if positions is not None and not torch.equal(positions.expand_as(keep)[keep], (keep.cumsum(1) - 1)[keep]):
        raise ValueError("position_ids: tokens are numbered 0, 1, ... from the first one attended to; leave it out")
