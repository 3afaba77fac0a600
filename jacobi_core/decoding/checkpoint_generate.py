"""`generate()` of an exported checkpoint: what its `custom_generate/generate.py` calls, and the text of that file.

The file imports this package and holds no code of the decoder, so that an export never decodes with an older version of it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.hf_generate import jacobi_generate

# What transformers 5.24 hands to no custom decoding loop: it would be ignored without a word.
DROPPED = ("streamer", "stop_strings", "assistant_model")


def checkpoint_generate(*args: Any, model: PreTrainedModel, block_size: int | None = None, **kwargs: Any) -> torch.Tensor:
    """`model.generate(*args, **kwargs)` as transformers documents it, decoded by `jacobi_generate` (whose settings it takes too).

    block_size: None is the decoder's default. A caller's own `custom_generate` goes first, without ours.
    Raises ValueError for a streamer, stop strings or an assistant model, and where `jacobi_generate` does.
    """
    generate = type(model).generate  # of the class: the instance's own is what called us
    if kwargs.get("custom_generate") is not None:
        return generate(model, *args, **kwargs)
    bound = inspect.signature(generate).bind_partial(model, *args, **kwargs).arguments
    config = bound.get("generation_config") or model.generation_config
    given = {"stop_strings": config.stop_strings} | bound.get("kwargs", {}) | bound
    refused = [name for name in DROPPED if given.get(name) is not None]
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: not supported by this checkpoint's parallel decoder; leave it out, or use type(model).generate(model, ...)"
        )
    if block_size is not None:
        kwargs["block_size"] = block_size
    return generate(model, *args, **{**kwargs, "custom_generate": jacobi_generate})


def generate_file(*, block_size: int | None) -> str:
    """Text of a checkpoint's `custom_generate/generate.py`. block_size: its default there, None for the decoder's."""
    return f'''"""Parallel decoding of this checkpoint: `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).generate(...)`.

Returns exactly what greedy decoding of the weights returns, in fewer forwards. The decoder is the package jacobi-forcing.
"""

BLOCK_SIZE = {block_size}  # tokens refreshed by one forward; pass block_size=... to change it


def generate(*args, model, block_size=BLOCK_SIZE, **kwargs):
    try:
        from jacobi_core import checkpoint_generate
    except ImportError as error:
        raise ImportError(
            "this checkpoint's parallel decoder needs the package jacobi-forcing: run `pip install jacobi-forcing`, "
            "or load the checkpoint without trust_remote_code to decode one token at a time"
        ) from error
    return checkpoint_generate(*args, model=model, block_size=block_size, **kwargs)
'''
