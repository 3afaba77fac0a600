"""FSDP2 applied from outside: the model class stays untouched."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(loss: nn.Module, *, workers: int) -> nn.Module:
    """Shard a PackedLoss over all ranks in place, one unit per decoder block; embeddings, head and loss stay together in the root unit.

    On a GPU parameters compute in bfloat16 and gradients are reduced in float32, and a block's parameters are freed between its forward
    and its backward; on the CPU everything keeps its dtype, and parameters once gathered stay until the backward is done (a gather through
    gloo costs more than the memory). One process without a GPU has nothing to shard and stays plain.
    """
    cuda = torch.cuda.is_available()
    if workers == 1 and not cuda:
        return loss
    mesh = init_device_mesh("cuda" if cuda else "cpu", (workers,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else MixedPrecisionPolicy()
    block_names = set(loss.model._no_split_modules or ())
    for module in list(loss.model.modules()):
        if type(module).__name__ in block_names:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=cuda)
    return fully_shard(loss, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # the backward starts where the root's forward ended
