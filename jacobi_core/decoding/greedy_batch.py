"""Greedy AR decoding of many prompts at once: the fast way to fixed points and to accuracy. No drafts here.

A fixed number of slots, each refilled as its answer ends. One column of the cache is one step: all slots append at the same column, and a
prompt that comes later is written right-aligned before it. So rows never move, no step copies the cache, and columns that no row needs
any more are dropped on the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.buffered_forward import BufferedForward
from jacobi_core.decoding.cache import model_mask
from jacobi_core.decoding.generate import check_context
from jacobi_core.decoding.tokens import TokenRules


@dataclass(frozen=True)
class GreedyAnswer:
    """tokens: long [t], EOS included; stop_reason: "eos" or "length"."""

    tokens: torch.Tensor
    stop_reason: str


@torch.inference_mode()
def greedy_batch(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, rules: TokenRules, slots: int | None = None
) -> list[GreedyAnswer]:
    """Greedy answers to all prompts, `slots` of them at a time (None: all); the longest prompts begin.

    In fp64 each answer equals its prompt's run alone. Raises ValueError for an empty prompt or one that does not fit the context.
    """
    if not all(len(p) for p in prompts):
        raise ValueError("every prompt needs at least one token")
    check_context(model, max(map(len, prompts), default=0), max_new_tokens)
    return _Slots(model, prompts, slots=slots or len(prompts), max_new_tokens=max_new_tokens, rules=rules).run()


class _Slots:
    """Shape legend: S slots, P prompts (row P of the answers takes what idle slots write), W cached columns, T max_new_tokens."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, slots: int, max_new_tokens: int, rules: TokenRules) -> None:
        self.model, self.prompts, self.rules = model, prompts, rules
        self.queue = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        self.forward = BufferedForward(model)
        device, idle = model.device, len(prompts)
        self.eos = rules.eos_tensor.to(device)
        self.owner_S = torch.full((min(slots, idle),), idle, device=device)
        self.token_S, self.size_S = torch.zeros_like(self.owner_S), torch.zeros_like(self.owner_S)  # newest token, not read yet; tokens read
        self.answer_PT = torch.zeros(idle + 1, max_new_tokens, dtype=torch.long, device=device)
        self.length_P = torch.zeros(idle + 1, dtype=torch.long, device=device)
        self.ended_P = torch.zeros(idle + 1, dtype=torch.bool, device=device)

    def run(self) -> list[GreedyAnswer]:
        while True:
            idle = self._idle()
            while self.queue and (len(idle) * 8 >= len(self.owner_S)):  # a few at once: a prefill of one row is slow
                self._fill(idle[: len(self.queue)])
                idle = self._idle()
            if len(idle) == len(self.owner_S):
                break
            if not self.queue and len(idle) * 4 >= len(self.owner_S):  # leaving one by one would copy the cache at every step
                self._leave()
            self._trim()
            self._step()
        lengths, ended, answers = self.length_P.tolist(), self.ended_P.tolist(), self.answer_PT.cpu()
        return [GreedyAnswer(answers[i, : lengths[i]].clone(), "eos" if ended[i] else "length") for i in range(len(self.prompts))]

    def _idle(self) -> torch.Tensor:
        return (self.owner_S == len(self.prompts)).nonzero().flatten()

    def _fill(self, rows: torch.Tensor) -> None:
        """Read the next prompts into these slots."""
        owners = [self.queue.pop() for _ in range(min(len(rows), len(self.queue)))]
        rows = rows[: len(owners)]
        prompts = [self.prompts[i] for i in owners]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.as_tensor(prompt)
        device = self.model.device
        size = torch.tensor([len(p) for p in prompts], device=device)
        column = torch.arange(longest, device=device)
        padding = (longest - size).unsqueeze(1)  # [s, 1] columns left of a prompt; they see themselves, or some attentions give NaN
        visible = (column >= padding).unsqueeze(1) & (column <= column.unsqueeze(1)) | torch.eye(longest, dtype=torch.bool, device=device)
        first = self.forward.length == 0
        reader = self.forward if first else BufferedForward(self.model)
        positions, mask = (column - padding).clamp(min=0), model_mask(self.model, visible.unsqueeze(1))
        logits = reader(ids.to(device), keep=1, position_ids=positions, attention_mask=mask)
        if not first:
            self.forward.write_rows(rows, reader)
        self.owner_S[rows] = torch.tensor(owners, device=device)
        self.size_S[rows] = size
        self._record(rows, logits[:, -1].argmax(-1))

    def _record(self, rows: torch.Tensor, token_s: torch.Tensor) -> None:
        """Append these slots' new tokens to their answers; a slot whose answer ends is idle from now on."""
        idle = len(self.prompts)
        owner = self.owner_S[rows]
        self.token_S[rows] = token_s
        self.answer_PT[owner, self.length_P[owner]] = token_s
        self.length_P[owner] += 1
        eos = torch.isin(token_s, self.eos)
        self.ended_P[owner] = eos
        self.owner_S[rows] = torch.where(eos | (self.length_P[owner] >= self.answer_PT.shape[1]), idle, owner)
        self.length_P[idle] = 0

    def _step(self) -> None:
        width, positions = self.forward.length + 1, self.size_S.unsqueeze(1).clone()
        self.size_S += 1
        visible = torch.arange(width, device=self.size_S.device) >= width - self.size_S.unsqueeze(1)  # [S, W]: a row fills the newest columns
        logits = self.forward(
            self.token_S.unsqueeze(1),
            keep=1,
            position_ids=positions,
            attention_mask=model_mask(self.model, visible[:, None, None]),
        )
        self._record(torch.arange(len(self.owner_S), device=self.owner_S.device), logits[:, -1].argmax(-1))

    def _trim(self) -> None:
        """Drop columns that no working row holds, but keep room to write the longest waiting prompt."""
        working = torch.where(self.owner_S == len(self.prompts), 0, self.size_S)
        needed = max(int(working.max()), len(self.prompts[self.queue[-1]]) if self.queue else 0)
        if needed < self.forward.length:
            self.forward.drop_left(self.forward.length - needed)

    def _leave(self) -> None:
        rows = (self.owner_S != len(self.prompts)).nonzero().flatten()
        self.forward.select_rows(rows)
        self.owner_S, self.token_S, self.size_S = self.owner_S[rows], self.token_S[rows], self.size_S[rows]
