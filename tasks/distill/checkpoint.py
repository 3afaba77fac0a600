"""Training state as torch distributed checkpoints: every rank writes its shard; any number of ranks may read it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tasks import artifacts

PROGRESS = "progress.json"  # beside the shards: everything that is not a tensor
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # beside adapters, the rest is in the folder training started from


def save(folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any], *, rank: int) -> None:
    """Trained weights and optimizer shards of this rank, into a folder that may be its own; rank 0 adds progress.json. Collective."""
    dcp.save(_state(module, optimizer), checkpoint_id=folder)
    if rank == 0:
        artifacts.write_json(folder / PROGRESS, progress)


def load(folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Into a module, sharded or not, and its optimizer, in place; returns progress. Collective.

    Raises what torch raises where the checkpoint lacks a tensor. Its index is a pickle, so only our own checkpoints are read.
    """
    state = _state(module, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_TRAINED)
    return artifacts.read_json(folder / PROGRESS)


def _state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is trained, tied weights once."""
    model, optimizer_state = get_state_dict(module, optimizer, options=_TRAINED)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained <= model.keys(), f"not in the state: {min(trained - model.keys())}"
    return {"model": {name: model[name] for name in sorted(trained)}, "optimizer": optimizer_state}
