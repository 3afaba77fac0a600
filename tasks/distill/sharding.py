"""FSDP2 applied from outside: the model class stays untouched."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel


def shard(model: PreTrainedModel, *, workers: int) -> PreTrainedModel:
    """Shard parameters over all ranks, one unit per decoder block; embeddings and head stay together in the root unit.

    On a GPU parameters compute in bfloat16 and gradients are reduced in float32; on the CPU everything keeps its dtype.
    """
    cuda = torch.cuda.is_available()
    mesh = init_device_mesh("cuda" if cuda else "cpu", (workers,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else MixedPrecisionPolicy()
    block_names = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in block_names:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
