"""FSDP2 and narrow matrix products, applied from outside: the model class stays untouched."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(loss: nn.Module, *, workers: int, compute_dtype: str | None = None) -> nn.Module:
    """Shard a PackedLoss over all ranks in place, one unit per decoder block; embeddings, head and loss stay together in the root unit.

    On a GPU parameters compute in bfloat16 unless compute_dtype is float32, gradients are reduced in float32, and a block's parameters are freed
    between its forward and its backward; on the CPU parameters keep their dtype (see `products_in`), and once gathered stay until the backward
    is done (a gather through gloo costs more than the memory). One process without a GPU has nothing to shard and stays plain.
    """
    cuda = torch.cuda.is_available()
    if workers == 1 and not cuda:
        return loss
    mesh = init_device_mesh("cuda" if cuda else "cpu", (workers,))
    narrow = cuda and compute_dtype != "float32"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if narrow else MixedPrecisionPolicy()
    block_names = set(loss.model._no_split_modules or ())
    for module in list(loss.model.modules()):
        if type(module).__name__ in block_names:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=cuda)
    return fully_shard(loss, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # the backward starts where the root's forward ended


def products_in(compute_dtype: str | None, device: torch.device) -> AbstractContextManager:
    """For a forward on a CPU: autocast, so that linear layers compute in bfloat16 where that is asked for, and all else as before.

    On a GPU, where attention is narrow as well, `shard` sees to it.
    """
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute_dtype == "bfloat16" and device.type == "cpu")
