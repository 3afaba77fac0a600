"""Loading a causal language model, and saving one as a plain Hugging Face checkpoint. No training, no decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from jacobi_core.decoding.checkpoint_generate import generate_file

ATTENTION = "sdpa"  # of every model loaded here

transformers_logging.disable_progress_bar()  # the bars of several workers garble one terminal


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(path: str | Path, *, dtype: str = "float32", device: torch.device | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A checkpoint folder as a model in eval mode, attention ATTENTION (it takes our masks). Safetensors only, never pickled weights.

    Raises ValueError where weights are missing or of another shape: transformers fills them with random numbers and only warns.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, dtype),
        attn_implementation=ATTENTION,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # told here, all of them, with the folder's name
        output_loading_info=True,
    )
    _check_complete(path, report)
    return model.to(device or default_device()).eval()


def _check_complete(path: str | Path, report: dict[str, Any]) -> None:
    problems = []
    if missing := sorted(report["missing_keys"]):  # a head tied to the embedding is not among them
        problems.append(f"lacks {len(missing)} weights ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''})")
    if wrong := sorted(str(key[0]) for key in report["mismatched_keys"]):
        problems.append(
            f"holds {len(wrong)} weights of another shape than its config.json says ({', '.join(wrong[:3])}{', ...' if len(wrong) > 3 else ''})"
        )
    if problems:
        raise ValueError(f"{path}: the checkpoint {' and '.join(problems)}; give a complete one")


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def empty_model(path: str | Path, *, dtype: str = "float32", trust_remote_code: bool = False) -> PreTrainedModel:
    """A model of the checkpoint's architecture with untrained weights, to load trained ones into or, on the meta device, to save them as."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    generation_config: GenerationConfig,
    with_decoder: bool = False,
    block_size: int | None = None,
) -> None:
    """A plain checkpoint (safetensors, ties kept) that `from_pretrained` reloads bit-equal.

    with_decoder: also the small file by which transformers, given trust_remote_code=True, decodes with this package; block_size: the
    default there, of the text it was trained on.
    """
    model.generation_config = generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if with_decoder:
        file = Path(folder, "custom_generate", "generate.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(generate_file(block_size=block_size), encoding="utf-8")
