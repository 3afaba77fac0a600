"""One forward for many texts that grow at different speeds, against one cache; texts join and leave between forwards. Knows nothing about drafts.

Every text has a slot of the cache and grows in it without holes, so that a text that accepts much costs the others nothing but masked columns
(users' reports C4-C6). A text that leaves is overwritten by the one in the last slot: the slots in use are always the first ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from jacobi_core.decoding.cache import Request, model_mask, refuse_unsuitable, side_by_side
from jacobi_core.decoding.row_cache import Place, RowLayer


class BatchForward:
    """What CachedForward is to the loop, for any number of texts. Not for training: call under torch.inference_mode().

    Shape legend: B texts, W cached columns, U columns of committed tokens (right-aligned), C of chains, Q = U + C.
    """

    def __init__(self, model: PreTrainedModel, rows: int = 0) -> None:
        """rows: texts to begin with. Raises ValueError for a model whose cache cannot be rolled back token by token."""
        self.model, self._place = model, Place()
        self.cache = DynamicCache(config=model.config)
        refuse_unsuitable(model, self.cache, DynamicLayer)
        self._layers = [RowLayer(self._place) for _ in self.cache.layers]
        self.cache.layers = self._layers
        self._slots = list(range(rows))  # by text, in the caller's order
        self._held = [0] * rows  # by slot: tokens that count, and so the text's next position
        self._written = [0] * rows  # by slot: columns that may hold anything
        self._requests: Sequence[Request] = ()

    def join(self, count: int) -> None:
        """New texts, after the others in the order of requests. Their first forward reads their prompts, apart from the others'."""
        self._slots += range(len(self._slots), len(self._slots) + count)
        self._held += [0] * count
        self._written += [0] * count

    @torch.inference_mode()
    def reserve(self, rows: int, columns: int) -> None:
        """Make the buffers just this large, at least as large as what they hold. Without it they grow by half when they have to."""
        assert rows >= len(self._slots) and columns >= max(self._held, default=0)
        self._place.rows, self._place.columns = rows, columns
        for layer in self._layers:
            layer.resize(rows, columns)
        self._written = [min(w, columns) for w in self._written]

    @property
    def reserved(self) -> tuple[int, int]:
        """(rows, columns) of the buffers; 0 while there is no text."""
        return self._place.rows, self._place.columns

    def logits_of(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """As CachedForward.logits_of, one request per text."""
        self._requests = requests
        by_slot = sorted(range(len(requests)), key=self._slots.__getitem__)
        old = next((s for s, held in enumerate(self._held) if held == 0), len(by_slot))
        assert not any(self._held[old:]), "a text joins behind those that have been read"
        logits = self._feed(0, [requests[i] for i in by_slot[:old]]) + self._feed(old, [requests[i] for i in by_slot[old:]])
        return [logits[slot] for slot in self._slots]

    def _feed(self, first: int, requests: Sequence[Request]) -> list[torch.Tensor]:
        """Of the texts in the slots from `first` on."""
        if not requests:
            return []
        rows, device = len(requests), self.model.device
        held = self._held[first : first + rows]
        totals = [sum(map(len, chains)) for _, chains in requests]
        U, C = max(len(committed) for committed, _ in requests), max(totals)
        Q, W = U + C, max(held) + U + C
        if len(self._slots) > self._place.rows or self._place.columns < W:
            self.reserve(max(len(self._slots), self._place.rows), self._place.columns if self._place.columns >= W else W + W // 2 + 16)
        ids, positions = torch.zeros(rows, Q, dtype=torch.long), torch.zeros(rows, Q, dtype=torch.long)
        columns = torch.arange(Q).repeat(rows, 1)
        fed_BQQ = torch.eye(Q, dtype=torch.bool).repeat(rows, 1, 1)  # padding sees itself, so that no query is left without a key
        for b, (committed, chains) in enumerate(requests):
            u = len(committed)
            start, stop = U - u, U + totals[b]
            ids[b, start:stop] = torch.tensor([*committed, *(token for chain in chains for token in chain)])
            steps = [*range(u), *(u + i for chain in chains for i in range(len(chain)))]
            positions[b, start:stop] = torch.tensor(steps) + held[b]
            fed_BQQ[b, start:stop, start:stop] = side_by_side(0, u, tuple(map(len, chains)))[0, 0]
            columns[b] = held[b] + (columns[b] - start) % Q  # the padding on the left is written behind everything else
            self._written[first + b] = max(self._written[first + b], held[b] + Q)
        visible = (torch.arange(W) < torch.tensor(held).unsqueeze(1)).unsqueeze(1).repeat(1, Q, 1)
        visible.scatter_(2, columns.unsqueeze(1).expand(-1, Q, -1), fed_BQQ)
        place = self._place
        place.first, place.width, place.index = first, W, columns.to(device)
        logits = self.model(
            input_ids=ids.to(device),
            position_ids=positions.to(device),
            attention_mask=model_mask(self.model, visible.unsqueeze(1).to(device)),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=C + 1,
        ).logits
        return [logits[b, : 1 + totals[b]] for b in range(rows)]

    def keep(self, verdicts: Sequence[tuple[int, int] | None]) -> None:
        """As CachedForward.keep; a text with None leaves."""
        moves: list[tuple[int, int, int, int]] = []  # slot, from, to, tokens
        for i, ((committed, chains), verdict) in enumerate(zip(self._requests, verdicts, strict=True)):
            if verdict is None:
                continue
            slot, (chain, accepted) = self._slots[i], verdict
            end = self._held[slot] + len(committed)
            if chain and accepted:
                moves.append((slot, end + sum(len(c) for c in chains[:chain]), end, accepted))
            self._held[slot] = end + accepted
        if moves:
            self._move(moves)
        self.leave([i for i, verdict in enumerate(verdicts) if verdict is None])

    def _move(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        slot, source, target, count = (torch.tensor(column).unsqueeze(1) for column in zip(*moves, strict=True))
        step = torch.arange(int(count.max()))
        to = target + step
        of = torch.where(step < count, source + step, to)  # shorter ones are padded with columns that stay what they are
        device = self.model.device
        for layer in self._layers:
            layer.move_columns(slot.squeeze(1).to(device), of.to(device), to.to(device))

    @torch.inference_mode()
    def leave(self, texts: Collection[int]) -> None:
        """Forget these texts, by their place in the order of requests; the others close ranks. Nothing of a text is left in its slot."""
        for slot in sorted((self._slots[i] for i in texts), reverse=True):
            last = len(self._held) - 1
            for layer in self._layers if last else ():
                if slot < last:
                    layer.clear(slot, self._written[slot])
                    layer.move_row(last, slot, self._written[last])
                layer.clear(last, self._written[last])
            self._slots[self._slots.index(last)], gone = slot, self._slots.index(slot)
            self._held[slot], self._written[slot] = self._held[last], self._written[last]
            del self._held[last], self._written[last], self._slots[gone]
        if not self._slots:
            self._place.rows = self._place.columns = 0
            for layer in self._layers:
                layer.drop()
