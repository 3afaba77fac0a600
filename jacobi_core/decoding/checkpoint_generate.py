"""`generate()` of an exported checkpoint: what its `custom_generate/generate.py` calls, and the text of that file.

The file imports this package and holds no code of the decoder, so that an export never decodes with an older version of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from jacobi_core.decoding.hf_generate import jacobi_generate


def checkpoint_generate(
    *args: Any, model: PreTrainedModel, defaults: Mapping[str, Any] | None = None, block_size: int | None = None, **kwargs: Any
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """`model.generate(*args, **kwargs)` as transformers documents it, decoded by `jacobi_generate` (whose settings it takes too).

    defaults: settings of the decoder that the checkpoint carries; they are a choice of one method, so a call that names a method gets none of
    them but the block size. block_size: None is the checkpoint's, else the decoder's default. A caller's own `custom_generate` goes first,
    without ours. transformers 5.24 hands neither `streamer` nor `tokenizer` to a custom loop: they are turned into what `jacobi_generate` takes.
    Raises ValueError for an assistant model, stop strings without their tokenizer, and where `jacobi_generate` does.
    """
    generate = type(model).generate  # of the class: the instance's own is what called us
    if kwargs.get("custom_generate") is not None:
        return generate(model, *args, **kwargs)
    bound = inspect.signature(generate).bind_partial(model, *args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if name not in ("self", "kwargs")} | bound.get("kwargs", {})
    if given.pop("assistant_model", None) is not None:
        raise ValueError(
            "assistant_model: not supported by this checkpoint's parallel decoder; leave it out, or use type(model).generate(model, ...)"
        )
    configs = [config for config in (given.get("generation_config"), model.generation_config) if config is not None]
    strings = next(filter(None, [given.pop("stop_strings", None), *(config.stop_strings for config in configs)]), None)
    tokenizer = given.pop("tokenizer", None)
    if strings:
        if tokenizer is None:
            raise ValueError("stop_strings: pass tokenizer=... too, it tells where the strings are")
        given["stop_strings"] = None  # transformers would look for the tokenizer that it drops
        given["stopping_criteria"] = [*(given.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
    carried = dict(defaults or {})
    if "method" in given:
        carried = {name: value for name, value in carried.items() if name == "block_size"}
    if block_size is not None:
        carried["block_size"] = block_size
    given = {**carried, **given}
    token_streamer = given.pop("streamer", None)
    return generate(model, **{**given, "custom_generate": jacobi_generate, "token_streamer": token_streamer})


def generate_file(*, block_size: int | None = None, decoding: Mapping[str, Any] | None = None) -> str:
    """Text of a checkpoint's `custom_generate/generate.py`. decoding: its defaults there (`jacobi_generate`'s parameters, plain values); without
    them block_size alone, None for the decoder's."""
    settings = dict(decoding) if decoding is not None else {} if block_size is None else {"block_size": block_size}
    return f'''"""Parallel decoding of this checkpoint: `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).generate(...)`.

Returns exactly what greedy decoding of the weights returns, in fewer forwards. The decoder is the package jacobi-forcing.
"""

DECODING = {settings!r}  # the decoder's settings; pass any of them to generate(...) to change it


def generate(*args, model, **kwargs):
    try:
        from jacobi_core import checkpoint_generate
    except ImportError as error:
        raise ImportError(
            "this checkpoint's parallel decoder needs the package jacobi-forcing: run `pip install jacobi-forcing`, "
            "or load the checkpoint without trust_remote_code to decode one token at a time"
        ) from error
    return checkpoint_generate(*args, model=model, defaults=DECODING, **kwargs)
'''
