"""Which forward decodes one text of a model: chosen by its device and by what its attention takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.batch import BatchForward
from jacobi_core.decoding.batch_axis import BatchAxisForward, takes_masks
from jacobi_core.decoding.cache import CachedForward, Request, context_length
from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.latency import LatencyCurve, measure_latency, powers_of_two, tokens_held
from jacobi_core.decoding.pace import Pace
from jacobi_core.decoding.static_forward import StaticForward, widths_for

BATCH_CONTEXT, BATCH_LIMIT = 16, 0.2  # tokens that each text holds, so that reading them is quick; seconds of a forward


class Forward(Protocol):
    """What the loop needs: see CachedForward."""

    def logits_of(self, requests: Sequence[Request]) -> list[torch.Tensor]: ...

    def keep(self, verdicts: Sequence[tuple[int, int] | None]) -> None: ...


def forward_for(model: PreTrainedModel, config: DecodingConfig, capacity: int) -> Forward:
    """capacity: most tokens the text may reach, prompt included. Raises ValueError for a cache that cannot be rolled back.

    No mask taken (flash-attn): candidates on the batch axis. On CUDA with dense masks: static shapes and a captured graph, whose
    capture pays over a long text or several (a StaticForward serves texts one after the other). Else the growing cache.
    """
    if not takes_masks(model):
        return BatchAxisForward(model)
    if is_static(model):
        return StaticForward(model, capacity=capacity, widths=widths_for(config))
    return CachedForward(model)


def is_static(model: PreTrainedModel) -> bool:
    """Is a StaticForward what decodes one text?"""
    return takes_masks(model) and model.device.type == "cuda" and model.config._attn_implementation != "flex_attention"


_CURVES: WeakKeyDictionary[PreTrainedModel, dict[tuple, LatencyCurve]] = WeakKeyDictionary()
_PACES: WeakKeyDictionary[PreTrainedModel, dict[tuple, Pace]] = WeakKeyDictionary()


def pace_of(model: PreTrainedModel, config: DecodingConfig, rows: int = 1) -> Pace | None:
    """None without config.auto. Kept while the process lives, as is the latency curve behind it: one curve per model, device, dtype, attention
    implementation and number of rows, measured once; one pace per curve and setting, so that a text goes on with what earlier ones under its
    own setting have taught."""
    if not config.auto:
        return None
    widest = config.block_size * config.chains
    widths = _measurable(model, widest)
    where = (len(widths), rows, model.device, model.dtype, model.config._attn_implementation)
    curves = _CURVES.setdefault(model, {})
    if where not in curves and rows > 1:
        curves[where] = batch_latency(model, rows, widest)
    elif where not in curves:
        forward = forward_for(model, config, tokens_held(widths))
        if isinstance(forward, StaticForward):
            forward = StaticForward(model, capacity=tokens_held(widths), widths=widths)
        curves[where] = measure_latency(forward, widths)
    setting = astuple(replace(config, seed=0, max_new_tokens=1))  # neither tells how well drafts do
    return _PACES.setdefault(model, {}).setdefault((where, setting), Pace(curves[where], rows=rows))


def batch_latency(model: PreTrainedModel, rows: int, widest: int) -> LatencyCurve:
    """Of forwards over `rows` texts, by the tokens that each of them feeds: 1, 2, 4, ... up to `widest` or until one takes BATCH_LIMIT."""
    return measure_latency(BatchForward(model, rows), _measurable(model, widest), context=BATCH_CONTEXT, rows=rows, limit=BATCH_LIMIT)


def held_in_batch(widest: int) -> int:
    """Most tokens of each text that `batch_latency` keeps room for."""
    return tokens_held(powers_of_two(widest), context=BATCH_CONTEXT) + widest


def _measurable(model: PreTrainedModel, widest: int) -> list[int]:
    """Powers of two that fit the model's context behind what measuring leaves there: a table of positions ends, the curve goes on as a line."""
    widths, limit = powers_of_two(widest), context_length(model)
    return [w for w in widths if limit is None or w == 1 or w + tokens_held(widths) <= limit]
