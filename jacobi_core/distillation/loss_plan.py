"""Which tokens of a packed batch need logits, and in which chunks: every clean token with a loss beside the noisy tokens it teaches.

So a clean token's logits serve as teacher and for the AR loss, and are computed once. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jacobi_core.distillation.packing import IGNORE, PackedRow


@dataclass(frozen=True)
class LossPlan:
    """T tokens, of which C are clean and S noisy. On the CPU: nothing done with it later waits for a device."""

    tokens: torch.Tensor  # long [T]: row * L + index; chunk by chunk, in each first the clean ones, then the noisy ones they teach
    labels: torch.Tensor  # long [C]: next token of the clean ones, or IGNORE
    teacher: torch.Tensor  # long [S]: which clean token of its chunk teaches a noisy one
    position: torch.Tensor  # long [S]: its block's position in the window, 0-based
    clean_sizes: list[int]  # per chunk
    noisy_sizes: list[int]

    @property
    def sizes(self) -> list[int]:
        return [clean + noisy for clean, noisy in zip(self.clean_sizes, self.noisy_sizes, strict=True)]


def plan_loss(batch: PackedRow, *, window: int, limit: int) -> LossPlan:
    """batch: fields [B, L]; window: w of its schedule; limit: most tokens in a chunk (a clean token and those it teaches stay together)."""
    length = len(batch)
    labels, teacher, block = torch.stack([batch.labels, batch.teacher, batch.block]).cpu().flatten(1)  # waits for the device: this plan's only time
    # 1. noisy tokens in the order of their teachers; the clean tokens that teach or are labelled
    noisy = (teacher >= 0).nonzero().flatten()
    taught_by = noisy // length * length + teacher[noisy]
    taught_by, order = taught_by.sort(stable=True)
    noisy = noisy[order]
    clean = torch.cat([(labels != IGNORE).nonzero().flatten(), taught_by]).unique()
    place = torch.searchsorted(clean, taught_by)
    # 2. the chunk of each: its end decides, so a chunk may begin up to one group early
    group = 1 + torch.bincount(place, minlength=len(clean))
    largest = int(group.max()) if len(clean) else 1
    chunk = ((group.cumsum(0) - 1) // max(1, limit - largest + 1)).unique_consecutive(return_inverse=True)[1]
    chunk_of_noisy = chunk[place]
    chunks = int(chunk[-1]) + 1 if len(clean) else 0
    clean_sizes = torch.bincount(chunk, minlength=chunks)
    noisy_sizes = torch.bincount(chunk_of_noisy, minlength=chunks)
    # 3. chunk by chunk
    by_chunk = torch.cat([chunk, chunk_of_noisy]).argsort(stable=True)
    first = clean_sizes.cumsum(0) - clean_sizes
    return LossPlan(
        tokens=torch.cat([clean, noisy])[by_chunk],
        labels=labels[clean],
        teacher=place - first[chunk_of_noisy],
        position=block[noisy] % window,
        clean_sizes=clean_sizes.tolist(),
        noisy_sizes=noisy_sizes.tolist(),
    )
