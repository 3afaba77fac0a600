"""Static forwards that stay with a model from call to call: `model.generate` captures its graphs once, not for every text.

A graph replays the kernels and addresses of its capture, so what those were is part of what a forward is kept under, and a model whose forward
is altered from outside (hooks, adapters) has none kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from weakref import WeakKeyDictionary, proxy

from transformers import PreTrainedModel

from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.forwards import Forward, forward_for, is_static
from jacobi_core.decoding.static_forward import StaticForward, widths_for

MOST = 4  # kept per model, the latest: each holds a cache
STEP = 512  # tokens: capacities are rounded up to a multiple, so that prompts of many lengths share a forward

_KEPT: WeakKeyDictionary[PreTrainedModel, dict[tuple, StaticForward]] = WeakKeyDictionary()


@contextmanager
def borrowed_forward(model: PreTrainedModel, config: DecodingConfig, capacity: int) -> Iterator[Forward]:
    """`forward_for`'s choice for one text, with the graphs of earlier texts where it has any. While one text has it no other gets it, and it
    lives no longer than the model. capacity: as for `forward_for`."""
    if not is_static(model) or _altered(model):
        yield forward_for(model, config, capacity)
        return
    kept, widths, capacity = _KEPT.setdefault(model, {}), widths_for(config), -(-capacity // STEP) * STEP
    key = (widths, capacity, *_baked_in(model))
    forward = kept.pop(key, None)
    if forward is None:
        forward = StaticForward(proxy(model), capacity=capacity, widths=widths)  # a strong reference would keep the model alive, and so itself
    try:
        yield forward
    finally:
        forward.restart()
        kept[key] = forward
        while len(kept) > MOST:
            kept.pop(next(iter(kept)))


def _altered(model: PreTrainedModel) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_disable_adapters") for module in model.modules())


def _baked_in(model: PreTrainedModel) -> tuple:
    """What a captured graph would go on using after it has changed."""
    addresses = tuple(tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers()))
    return model.device, model.dtype, model.config._attn_implementation, model.training, addresses
