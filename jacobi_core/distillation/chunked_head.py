"""A loss over tokens whose logits would not fit into memory together: head and loss, chunk by chunk. Knows nothing of which loss.

The gradients are taken in the forward, while a chunk's logits are there, and only scaled in the backward: no logit is kept, and none is
computed twice. The idea is Liger Kernel's fused linear cross-entropy; this is plain autograd, so any head module will do (bias, adapters).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def chunked_loss(
    hidden: torch.Tensor, sizes: Sequence[int], *, head: nn.Module, chunk_loss: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Scalar: the sum of `chunk_loss(number, head(chunk))` over hidden, [T, D], cut into chunks of `sizes` tokens (their sum is T).

    `chunk_loss` returns a scalar; what else it finds out it may keep, detached. Differentiable once, with respect to hidden and the head's
    parameters; their gradients are summed over chunks in float32 at least. Under FSDP2 the head must belong to the unit whose forward calls
    this. Where no gradient is asked for, none is computed.
    """
    parameters = [p for p in head.parameters() if p.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        return _ChunkedLoss.apply(sizes, head, chunk_loss, hidden, *parameters)
    total = torch.zeros((), dtype=at_least_float32(hidden.dtype), device=hidden.device)
    for number, chunk in enumerate(_chunks(hidden, sizes)):
        total += chunk_loss(number, head(chunk))
    return total


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sizes: Sequence[int], head: nn.Module, chunk_loss: Callable, hidden: torch.Tensor, *parameters: nn.Parameter
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=at_least_float32(hidden.dtype), device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_parameters = [torch.zeros_like(p, dtype=at_least_float32(p.dtype)) for p in parameters]
        for number, (chunk, gradient) in enumerate(zip(_chunks(hidden, sizes), _chunks(of_hidden, sizes), strict=True)):
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                loss = chunk_loss(number, head(chunk))
            of_chunk, *of_head = torch.autograd.grad(loss, [chunk, *parameters], allow_unused=True)
            gradient.copy_(of_chunk)
            for total_gradient, part in zip(of_parameters, of_head, strict=True):
                if part is not None:  # e.g. an adapter that is not active
                    total_gradient.add_(part)
            total += loss.detach()
            del of_head  # as large as the head: not to be there while the next one is made
        ctx.dtypes = [t.dtype for t in (hidden, *parameters)]
        ctx.gradients = [of_hidden, *of_parameters]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were handed out by an earlier backward; compute the loss anew")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: the head's gradient is as large as the head
        return (None, None, None, *(g.mul_(scale).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)))


def _chunks(tokens: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    return tokens.split(list(sizes)) if sizes else ()
