"""Greedy answers to many prompts: a fixed number of slots, each refilled as its answer ends. No drafts here.

One column of the cache is one step: all slots append at the same column, and a prompt that comes later is written right-aligned
before it. So rows never move, no step copies the cache, and columns that no row needs any more are dropped on the left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from jacobi_core.decoding.cache import CachedForward, model_mask
from jacobi_core.decoding.generate import check_context
from jacobi_core.decoding.greedy_batch import GreedyAnswer
from jacobi_core.decoding.tokens import TokenRules


class BufferLayer(DynamicLayer):
    """A cache layer that appends in place; `keys` and `values` [B, H, W, d] are views of the filled columns of larger buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []
        self._first = self._end = 0

    def _show(self) -> None:
        self.keys, self.values = (b[:, :, self._first : self._end] for b in self._buffers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        new = key_states.shape[-2]
        if not self._buffers or self._end + new > self._buffers[0].shape[-2]:
            held = self._end - self._first
            room = held + new + (held + new) // 2 + 16
            larger = []
            for old in (self.keys, self.values):
                buffer = old.new_empty(*old.shape[:2], room, old.shape[3])
                buffer[:, :, :held] = old
                larger.append(buffer)
            self._buffers, self._first, self._end = larger, 0, held
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._end : self._end + new] = states
        self._end += new
        self._show()
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        self._end -= abs(tokens_to_remove)
        self._show()

    def drop_left(self, columns: int) -> None:
        self._first += columns
        self._show()

    def narrow(self, start: int, stop: int) -> BufferLayer:
        """These rows, in the same memory: what it appends is not seen here, and overwritten by the next append here."""
        part = BufferLayer()
        part.is_initialized, part.device = True, self.device
        part._buffers, part._first, part._end = [b[start:stop] for b in self._buffers], self._first, self._end
        part._show()
        return part

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._buffers = [b[indices] for b in (self.keys, self.values)]
        self._first, self._end = 0, self._buffers[0].shape[-2]
        self._show()


class BufferedForward(CachedForward):
    """A CachedForward that copies its cache only to grow it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.cache.layers = [BufferLayer() for _ in self.cache.layers]

    def drop_left(self, columns: int) -> None:
        """Forget the oldest columns."""
        for layer in self.cache.layers:
            layer.drop_left(columns)

    def narrow(self, start: int, stop: int) -> BufferedForward:
        """A forward over some rows, for one call: its cache begins as this one's rows and its tokens are not kept here."""
        part = BufferedForward(self.model)
        part.cache.layers = [layer.narrow(start, stop) for layer in self.cache.layers]
        return part

    def write_rows(self, rows: torch.Tensor, source: CachedForward) -> None:
        """Copy the rows of another cache, in order, to the newest columns of these rows."""
        for mine, theirs in zip(self.cache.layers, source.cache.layers, strict=True):
            for to, part in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                to[rows, :, to.shape[2] - part.shape[2] :] = part


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, slots: int, max_new_tokens: int, rules: TokenRules
) -> list[GreedyAnswer]:
    """Greedy answers to all prompts, `slots` of them at a time; the longest prompts begin.

    In fp64 each answer equals its prompt's run alone. Raises ValueError for an empty prompt or one that does not fit the context.
    """
    if not all(len(p) for p in prompts):
        raise ValueError("every prompt needs at least one token")
    check_context(model, max(map(len, prompts), default=0), max_new_tokens)
    return _Slots(model, prompts, slots=slots, max_new_tokens=max_new_tokens, rules=rules).run()


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
