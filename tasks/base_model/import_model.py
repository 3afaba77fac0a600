"""Brings a causal language model from anywhere into one plain Hugging Face checkpoint: safetensors, config, generation config, tokenizer.

Sources are those of model_source.py. Importing is done once, as a stage: a GGUF file takes 10-30 s to load, the checkpoint 0.1 s. Weights are
not changed but for their dtype (and a GGUF's de-quantization). Torch and transformers are imported when a function is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.base_model.model_source import ModelSource, hub_commit, model_identity, resolve_source
from tasks.stage import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["import_model", "load_tokenizer", "model_identity", "resolve_source"]

DTYPES = ("float32", "bfloat16", "float16")
SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")


def import_model(path: str, output: Path, *, trust_remote_code: bool = False, dtype: str = "float32") -> None:
    """Writes the model at `path` to the folder `output`, in `dtype` (float32, bfloat16 or float16).

    Raises:
        UserError: nothing loadable at `path` (missing, no checkpoint, not reachable, no tokenizer, weights that do not fit), no causal language
            model, code of its own without `trust_remote_code`, or an unknown dtype.
    """
    if dtype not in DTYPES:
        raise UserError(f"model.dtype: {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    source = resolve_source(path)
    where = _arguments(source, trust_remote_code)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    model = _load(path, source, where, dtype)
    # Decoding needs to know where an answer ends and what fills a batch; a checkpoint that does not say takes it from its tokenizer.
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if not model.generation_config.do_sample:
        for flag in SAMPLING_FLAGS:  # without effect, but transformers refuses to save them next to greedy decoding
            setattr(model.generation_config, flag, None)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `path`, without its weights (for a GGUF file this still takes some seconds).

    Raises:
        UserError: as `import_model`.
    """
    from transformers import AutoTokenizer

    source = resolve_source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **_arguments(source, trust_remote_code))
    except Exception as error:  # every library below raises its own kinds
        raise _unloadable(path, source, "tokenizer", error) from error
    # Without tokenizer files transformers makes one that knows special tokens only, and says nothing.
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()):
        raise UserError(f"model.path: {path} has no tokenizer; put its tokenizer files next to config.json")
    return tokenizer


def _arguments(source: ModelSource, trust_remote_code: bool) -> dict:
    arguments = {"trust_remote_code": trust_remote_code}
    if source.gguf_file:
        arguments["gguf_file"] = source.gguf_file
    if source.hub and (commit := hub_commit(source.location)):
        arguments["revision"] = commit  # the one that model_identity named
    return arguments


def _load(path: str, source: ModelSource, where: dict, dtype: str) -> PreTrainedModel:
    """The model with all its weights, in `dtype`, able to be saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source.location, **where)
    except Exception as error:
        raise _unloadable(path, source, "config", error) from error
    _check_causal(path, config)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(source.location, dtype=getattr(torch, dtype), output_loading_info=True, **where)
    except Exception as error:
        raise _unloadable(path, source, "weights", error) from error
    if missing := sorted(report["missing_keys"]):
        # transformers only warns and fills them with random numbers
        raise UserError(f"model.path: {path} lacks {len(missing)} weights, the first is {missing[0]}; give a complete checkpoint")
    if source.gguf_file is None:
        return model
    # A model loaded from GGUF counts as quantized and refuses to be saved; its weights do not.
    plain = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def _check_causal(path: str, config: PretrainedConfig) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = config.architectures or []
    if architectures:
        causal = any(name.endswith(CAUSAL_HEADS) for name in architectures)
    else:
        causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not causal or config.is_encoder_decoder:
        found = ", ".join(architectures) or config.model_type
        raise UserError(f"model.path: {path} is no causal language model (config.json says {found}); give a decoder-only model")


def _unloadable(path: str, source: ModelSource, part: str, error: Exception) -> UserError:
    """One line that says what to do about a loading error of the libraries below."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return UserError(f"model.path: {path} brings code of its own; read it, then set model.trust_remote_code=true")
    if source.hub:
        return UserError(
            f"model.path: {path} is no local path, and its {part} cannot be had from the Hugging Face hub "
            f"(offline, unknown or not allowed); check the name or give a local path. {text[:200]}"
        )
    return UserError(f"model.path: the {part} of {path} cannot be loaded; check or replace its files. {type(error).__name__}: {text[:300]}")
