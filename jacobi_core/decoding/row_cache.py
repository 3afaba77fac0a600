"""The cache of many rows that grow, join and leave at their own pace: every row begins at column 0 of its slot, and nothing else is moved.

What a forward feeds is written behind what its row holds, wherever that is; columns beyond a row's own are masked. Which row stands in
which slot, and how much of it counts, is `batch.BatchForward`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers.cache_utils import DynamicLayer


@dataclass
class Place:
    """Where the next forward writes and reads, shared by all layers. rows, columns: what the buffers hold."""

    rows: int = 0
    columns: int = 0
    first: int = 0  # slots first .. first + B - 1 are fed
    width: int = 0  # columns that the forward attends to
    index: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))  # [B, Q] column of every token fed


class RowLayer(DynamicLayer):
    """Buffers [rows, H, columns, d], all zeros until written: a masked column is multiplied by 0, which only finite values survive."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place, self._buffers = place, []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        place = self._place
        if not self._buffers:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [s.new_zeros(place.rows, s.shape[1], place.columns, s.shape[3]) for s in (key_states, value_states)]
        found, index = [], place.index[:, None, :, None]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            fed = buffer[place.first : place.first + len(states), :, : place.width]
            fed.scatter_(2, index.expand(-1, states.shape[1], -1, states.shape[3]), states)
            found.append(fed)
        self.keys, self.values = found
        return self.keys, self.values

    def resize(self, rows: int, columns: int) -> None:
        """Keep what fits."""
        for i, old in enumerate(self._buffers):
            new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
            part = old[:rows, :, :columns]
            new[: part.shape[0], :, : part.shape[2]] = part
            self._buffers[i] = new
        self.keys = self.values = None  # views of the old buffers would keep them

    def move_columns(self, slots: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Within slots [m], copy columns source [m, k] to columns target [m, k]."""
        for buffer in self._buffers:
            buffer[slots[:, None], :, target] = buffer[slots[:, None], :, source]

    def move_row(self, source: int, target: int, columns: int) -> None:
        for buffer in self._buffers:
            buffer[target, :, :columns] = buffer[source, :, :columns]

    def clear(self, slot: int, columns: int) -> None:
        for buffer in self._buffers:
            buffer[slot, :, :columns] = 0

    def drop(self) -> None:
        """Give the memory back."""
        self._buffers, self.keys, self.values = [], None, None
