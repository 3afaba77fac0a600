"""A CachedForward whose cache grows in place: for many rows that read one token a step, where copying the cache each time would be the work."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from jacobi_core.decoding.cache import CachedForward


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
