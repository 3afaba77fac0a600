"""LoRA by peft: adapters inside an otherwise untouched model, their files, and the merge back. The only place that imports peft.

Adapters are injected: the model stays the transformers class it was, so masks, packed loss, FSDP2 and decoder see an ordinary model whose
linear layers hold two small matrices more. Names of the adapters' tensors are the live module's, `...q_proj.lora_A.default.weight`; peft's
own file calls them `base_model.model....q_proj.lora_A.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from tasks.distill.config import LoraSettings
from tasks.stage import UserError

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"  # every linear layer but the output head
ADAPTER_FILE = "adapter_model.safetensors"
_ADAPTER, _PEFT_PREFIX = "default", "base_model.model."


def with_adapters(model: PreTrainedModel, settings: LoraSettings, seed: int) -> PreTrainedModel:
    """The same model, changed in place: adapters on its target modules, everything else frozen. Before sharding.

    The first matrix is drawn with `seed`, the second is zero: the model's outputs are unchanged. The global random state is left alone.
    Raises UserError where peft is missing or a target module does not exist.
    """
    config = _config(model, settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _peft().inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def has_adapters(names: Iterable[str]) -> bool:
    """Whether these parameter names are those of a model with adapters."""
    return any(".lora_" in name for name in names)


def is_adapter_folder(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def write_adapters(folder: Path, state: Mapping[str, torch.Tensor], *, base: Path, model: PreTrainedModel, settings: LoraSettings) -> None:
    """peft's own folder (adapter_config.json, adapter_model.safetensors). state: live names; base: folder of the model they belong to;
    model: it, its weights are not read."""
    from safetensors.torch import save_file

    config = _config(model, settings)
    config.base_model_name_or_path = base.name  # no path of this machine: whoever merges knows where the base is
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {_PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """`model`, the base in its own weights, with the adapters of `folder` added into them: a plain model again.

    Raises ValueError where the file does not hold every adapter's tensors: peft only warns, and would merge none there.
    """
    from safetensors import safe_open

    with_them = _peft().PeftModel.from_pretrained(model, str(folder))
    with safe_open(folder / ADAPTER_FILE, "pt") as file:
        missing = _peft().get_peft_model_state_dict(with_them, save_embedding_layers=False).keys() - set(file.keys())
    if missing:
        raise ValueError(f"{folder}: the adapters lack {len(missing)} weights, the first is {min(missing)}; give a complete folder")
    return with_them.merge_and_unload()


def _peft():
    try:
        import peft
    except ImportError as error:
        raise UserError("distill.lora.rank is above 0, but peft is not installed: run `pip install jacobi-forcing[lora]`") from error
    return peft


def _config(model: PreTrainedModel, settings: LoraSettings) -> LoraConfig:
    targets = settings.target_modules
    wanted = [targets] if isinstance(targets, str) else list(targets)
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head]
    for target in wanted:
        if target != ALL_LINEAR and not any(name == target or name.endswith(f".{target}") for name in linear):
            kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
            raise UserError(f"distill.lora.target_modules: the model has no linear layer {target!r}; it has {kinds} (or {ALL_LINEAR!r})")
    return _peft().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if ALL_LINEAR in wanted else wanted,
        task_type="CAUSAL_LM",
    )
