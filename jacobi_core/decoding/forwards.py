"""Which forward decodes one text of a model: chosen by its device and by what its attention takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.batch_axis import BatchAxisForward, takes_masks
from jacobi_core.decoding.cache import CachedForward, Request, context_length
from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.latency import LatencyCurve, measure_latency, powers_of_two, tokens_held
from jacobi_core.decoding.pace import Pace
from jacobi_core.decoding.static_forward import StaticForward, widths_for


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
    widths = powers_of_two(config.block_size * config.chains * rows)
    if (limit := context_length(model)) is not None:  # a table of positions ends there; the curve goes on as a line
        widths = [w for w in widths if w == 1 or w + tokens_held(widths) <= limit]
    where = (len(widths), rows, model.device, model.dtype, model.config._attn_implementation)
    curves = _CURVES.setdefault(model, {})
    if where not in curves:
        forward = forward_for(model, config, tokens_held(widths))
        if isinstance(forward, StaticForward):
            forward = StaticForward(model, capacity=tokens_held(widths), widths=widths)
        curves[where] = measure_latency(forward, widths)
    setting = astuple(replace(config, seed=0, max_new_tokens=1))  # neither tells how well drafts do
    return _PACES.setdefault(model, {}).setdefault((where, setting), Pace(curves[where], rows=rows))
