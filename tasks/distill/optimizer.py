"""AdamW and its learning-rate schedule, the same for every way of cutting up the work."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from tasks.distill.config import DistillConfig


def make_optimizer(module: nn.Module, config: DistillConfig, *, total_steps: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Over the parameters that are trained (already sharded). Weight decay is for matrices (embeddings included), not for norms and biases."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2), fused=True
    )
    warmup = round(config.warmup_share * total_steps)
    return optimizer, get_scheduler(config.lr_schedule.value, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps)


def clip_gradients(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales all gradients to a global norm of at most max_norm; returns the norm before, a scalar. Collective."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
