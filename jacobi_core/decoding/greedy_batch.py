"""Greedy AR decoding of many prompts at once: the fast way to fixed points and to accuracy. No drafts here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.generate import check_context
from jacobi_core.decoding.tokens import TokenRules


@dataclass(frozen=True)
class GreedyAnswer:
    """tokens: long [t], EOS included; stop_reason: "eos" or "length"."""

    tokens: torch.Tensor
    stop_reason: str


@torch.inference_mode()
def greedy_batch(model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, rules: TokenRules) -> list[GreedyAnswer]:
    """Greedy answers to all prompts in one left-padded batch; finished rows leave it.

    In fp64 each row equals its run alone. Raises ValueError for an empty prompt or one that does not fit the context.
    """
    if not prompts:
        return []
    if not all(len(p) for p in prompts):
        raise ValueError("every prompt needs at least one token")
    longest = max(len(p) for p in prompts)
    check_context(model, longest, max_new_tokens)
    device = model.device
    ids_BL = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask_BK = torch.zeros(len(prompts), longest + max_new_tokens, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids_BL[row, longest - len(prompt) :] = torch.as_tensor(prompt)
        mask_BK[row, longest - len(prompt) :] = 1
    ids_BL, mask_BK = ids_BL.to(device), mask_BK.to(device)
    positions_BL = (mask_BK[:, :longest].cumsum(1) - 1).clamp(min=0)

    forward = CachedForward(model)
    answers_BT = torch.zeros(len(prompts), max_new_tokens, dtype=torch.long, device=device)
    lengths_B = torch.full((len(prompts),), max_new_tokens, dtype=torch.long, device=device)
    ended_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    rows = torch.arange(len(prompts), device=device)  # batch row -> prompt
    eos = rules.eos_tensor.to(device)
    for step in range(max_new_tokens):
        logits = forward(ids_BL, keep=1, position_ids=positions_BL, attention_mask=mask_BK[rows, : longest + step])
        token_b = logits[:, -1].argmax(-1)
        answers_BT[rows, step] = token_b
        stops_b = torch.isin(token_b, eos) & ~ended_B[rows]
        lengths_B[rows[stops_b]] = step + 1
        ended_B[rows[stops_b]] = True
        alive = (~ended_B[rows]).nonzero().flatten()
        if len(alive) == 0:
            break
        next_positions = positions_BL[:, -1:] + 1
        if len(alive) <= 0.75 * len(rows):  # leaving one by one would copy the cache at every step
            forward.select_rows(alive)
            rows, token_b, next_positions = rows[alive], token_b[alive], next_positions[alive]
        ids_BL, positions_BL = token_b.unsqueeze(1), next_positions
    answers, lengths, ended = answers_BT.cpu(), lengths_B.tolist(), ended_B.tolist()
    return [GreedyAnswer(answers[i, : lengths[i]].clone(), "eos" if ended[i] else "length") for i in range(len(prompts))]
