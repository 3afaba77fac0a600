"""One forward for many texts that grow at different speeds, against one cache. Knows nothing about drafts.

A row's accepted tokens are moved together behind what it holds; columns that a row has not filled are masked, never read, and taken
out once they are a quarter of the cache (users' reports C4-C6).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import CachedForward, Request, model_mask, side_by_side


class BatchForward(CachedForward):
    """Shape legend: B rows, W cached columns, U columns of committed tokens (right-aligned), C of chains, Q = U + C."""

    def __init__(self, model: PreTrainedModel, rows: int) -> None:
        super().__init__(model)
        self._valid_BW = torch.zeros(rows, 0, dtype=torch.bool)  # columns a row has filled
        self._seen = [0] * rows  # tokens a row holds: its next position
        self._requests: Sequence[Request] = ()

    def logits_of(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        self._requests = requests
        rows, device = len(requests), self.model.device
        totals = [sum(map(len, chains)) for _, chains in requests]
        U, C = max(len(committed) for committed, _ in requests), max(totals)
        ids, positions = torch.zeros(rows, U + C, dtype=torch.long), torch.zeros(rows, U + C, dtype=torch.long)
        fed_BQQ = torch.eye(U + C, dtype=torch.bool).repeat(rows, 1, 1)  # padding sees itself, so that no query is left without a key
        for b, (committed, chains) in enumerate(requests):
            start, stop, u = U - len(committed), U + totals[b], len(committed)
            ids[b, start:stop] = torch.tensor([*committed, *(token for chain in chains for token in chain)])
            steps = [*range(u), *(u + i for chain in chains for i in range(len(chain)))]
            positions[b, start:stop] = torch.tensor(steps) + self._seen[b]
            fed_BQQ[b, start:stop, start:stop] = side_by_side(0, u, tuple(map(len, chains)))[0, 0]
        visible = torch.cat([self._valid_BW.unsqueeze(1).expand(-1, U + C, -1), fed_BQQ], 2).unsqueeze(1)
        mask = model_mask(self.model, visible.to(device))
        logits = self(ids.to(device), keep=C + 1, position_ids=positions.to(device), attention_mask=mask)
        return [logits[b, : 1 + totals[b]] for b in range(rows)]

    def keep(self, verdicts: Sequence[tuple[int, int] | None]) -> None:
        W, rows = self._valid_BW.shape[1], len(verdicts)
        U = max(len(committed) for committed, _ in self._requests)
        longest = max((verdict[1] for verdict in verdicts if verdict), default=0)
        source = torch.zeros(rows, longest, dtype=torch.long)
        filled = torch.zeros(rows, U + longest, dtype=torch.bool)
        for b, ((committed, chains), verdict) in enumerate(zip(self._requests, verdicts, strict=True)):
            chain, accepted = verdict or (0, 0)
            start = W + U + sum(len(c) for c in chains[:chain])
            source[b, :accepted] = torch.arange(start, start + accepted)
            filled[b, U - len(committed) : U + accepted] = True
            self._seen[b] += len(committed) + accepted
        self._gather(source, at=W + U)
        self.rollback(W + U + longest)
        self._valid_BW = torch.cat([self._valid_BW, filled], 1)
        alive = [b for b, verdict in enumerate(verdicts) if verdict is not None]
        if alive and len(alive) < rows:
            self.select_rows(torch.tensor(alive, device=self.model.device))
            self._valid_BW, self._seen = self._valid_BW[alive], [self._seen[b] for b in alive]
        if self.length > 1.25 * max(self._seen) + 32:
            order = (~self._valid_BW).long().argsort(dim=1, stable=True)[:, : max(self._seen)]
            self._gather(order, at=0)
            self.rollback(order.shape[1])
            self._valid_BW = self._valid_BW.gather(1, order)

    def _gather(self, source: torch.Tensor, *, at: int) -> None:
        """Per row, copy the cache columns `source` [B, k] to columns at .. at+k-1."""
        if source.shape[1] == 0:
            return
        index = source.to(self.model.device)[:, None, :, None]
        for layer in self.cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor[:, :, at : at + source.shape[1]] = tensor.gather(2, index.expand(-1, tensor.shape[1], -1, tensor.shape[3]))
