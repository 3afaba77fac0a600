"""Who may see whom in a packed row: one rule, written once, and its dense mask (algorithm section 4; paper figure 2)."""

from __future__ import annotations

import torch

from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.packing import Kind, PackedRow


def visible(row: PackedRow, *, queries: torch.Tensor, keys: torch.Tensor, variant: MaskVariant) -> torch.Tensor:
    """May the token at index `queries` see the one at `keys`? long index tensors that broadcast; row fields are [L].

    Padding sees padding only, so that no query is left without a key.
    """

    def q(field: torch.Tensor) -> torch.Tensor:
        return field[queries]

    def k(field: torch.Tensor) -> torch.Tensor:
        return field[keys]

    earlier = k(row.position_ids) <= q(row.position_ids)
    noisy_q, noisy_k = q(row.kind) == Kind.NOISY, k(row.kind) == Kind.NOISY
    clean_q, clean_k = q(row.kind) == Kind.CLEAN, k(row.kind) == Kind.CLEAN
    prompt = (k(row.kind) == Kind.PROMPT) & earlier
    causal = clean_q & clean_k & earlier
    if variant is MaskVariant.nc:
        noisy = (clean_k & (k(row.window) < q(row.window))) | (noisy_k & (k(row.window) == q(row.window)) & earlier)
    else:
        noisy = (clean_k & (k(row.block) < q(row.block))) | (noisy_k & (k(row.block) == q(row.block)) & earlier)
    return (k(row.sample) == q(row.sample)) & (prompt | causal | (noisy_q & noisy))


def dense_mask(batch: PackedRow, variant: MaskVariant = MaskVariant.nc) -> torch.Tensor:
    """bool [B, 1, L, L], True = attend, for a batch of rows [B, L]. The oracle of every other backend."""
    index = torch.arange(len(batch), device=batch.input_ids.device)
    masks = [
        visible(PackedRow(**{name: field[b] for name, field in vars(batch).items()}), queries=index[:, None], keys=index[None, :], variant=variant)
        for b in range(batch.input_ids.shape[0])
    ]
    return torch.stack(masks).unsqueeze(1)
