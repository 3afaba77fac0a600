"""The weights of a training run on their way out: gathered from all ranks, written by one. Knows nothing of optimizers or steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tasks.distill.adapters import has_adapters, write_adapters
from tasks.distill.config import DistillConfig


def gathered(loss_module: torch.nn.Module, *, rank: int) -> dict[str, torch.Tensor] | None:
    """Whole tensors of the model inside a PackedLoss (its `model`), on the CPU of rank 0; None on the others. Collective.

    Names are those transformers knows, tied weights stand once, the tensors are copies in the dtype of the master weights. With adapters:
    only theirs, the frozen rest is in the folder that training started from.
    """
    names = {name for name, _ in loss_module.named_parameters()}  # of tied parameters the first name
    repeated = {name for name, _ in loss_module.named_parameters(remove_duplicate=False)} - names
    adapters = has_adapters(names)
    state = {}
    for name, tensor in loss_module.state_dict().items():
        if name in repeated or (adapters and ".lora_" not in name):
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # collective: one whole tensor on the device at a time
        if rank == 0:
            state[name.removeprefix("model.")] = whole.detach().to("cpu", copy=True)
    return state if rank == 0 else None


def load_into(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """What `gathered` returned, copied into a plain model of one process (with the same adapters, if it has some), in place."""
    expected = {name for name, _ in model.named_parameters()}
    if has_adapters(expected):
        expected = {name for name in expected if ".lora_" in name}
    assert expected <= set(state), f"weights are missing, the first is {min(expected - set(state))}"
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    assert not unexpected, f"weights that the model does not have, the first is {unexpected[0]}"


def write_weights(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    *,
    source_model_folder: Path,
    config: DistillConfig,
    trust_remote_code: bool,
) -> None:
    """`state`, from `gathered`, as a folder that appears whole or not at all; one that is there already is replaced. Rank 0 only.

    Full fine-tuning: a plain checkpoint without tokenizer (config, safetensors in shards, ties kept, the dtype of the state). LoRA: peft's
    adapter folder. source_model_folder: where training started from, for the architecture.
    """
    from jacobi_core.hub import empty_model

    temporary, old = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)  # of an attempt that was killed
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    with torch.device("meta"):  # the shape of the model; its weights are `state`
        model = empty_model(source_model_folder, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        temporary.mkdir(parents=True)
        if config.lora.rank:
            write_adapters(temporary, state, base=source_model_folder, model=model, settings=config.lora)
        else:
            missing = {name for name, _ in model.named_parameters()} - set(state)
            assert not missing, f"weights are missing, the first is {min(missing)}"
            model.save_pretrained(temporary, state_dict=dict(state))
        _sync(temporary)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
