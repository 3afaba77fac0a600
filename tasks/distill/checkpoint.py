"""Training state as torch distributed checkpoints: every rank writes its shard; any number of ranks may read it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict

from tasks import artifacts


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any], *, rank: int) -> None:
    """Model and optimizer shards of this rank; rank 0 adds progress.json (step, scheduler, curves). Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    if rank == 0:
        artifacts.write_json(folder / "progress.json", progress)


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Into a sharded model and its optimizer, in place; returns progress. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return artifacts.read_json(folder / "progress.json")


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Only the weights, into an ordinary model of one process; needs no process group."""
    options = StateDictOptions(full_state_dict=True)
    state = {"model": get_model_state_dict(model, options=options)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(model, state["model"], options=options)
