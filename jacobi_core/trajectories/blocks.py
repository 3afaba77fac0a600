"""The Jacobi states of all blocks of some answers at once. Where the answers come from is not its business.

The fixed points of all blocks are the greedy answer, so every block can iterate at the same time against the clean prefix
before it (algorithm section 2b). A converged prefix has the clean tokens' keys and values, so only what follows it is fed.
Shape legend: B answers, N blocks of the longest, n block size, T prompt+answer tokens of the longest, Q tokens fed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.buffered_forward import BufferedForward
from jacobi_core.decoding.cache import model_mask
from jacobi_core.decoding.drafts import first_guess
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.trajectories.record import converged_prefix

# tokens: a forward that is busy enough, and padding that costs more than one more forward
FULL_FORWARD, SPLIT_SAVES = 256, 64


class CleanTexts:
    """Prompts and answers as the model reads them once, teacher-forced: their cache, and whether it predicts the answers again.

    agreed_B: leading answer tokens that it predicts; disagreements: answer tokens that it does not (0 in fp64).
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> None:
        self.prompt_B, self.answer_B = (torch.tensor([len(x) for x in texts]) for texts in (prompts, answers))
        self.clean_BT = torch.nn.utils.rnn.pad_sequence([torch.cat([p, a]) for p, a in zip(prompts, answers, strict=True)], batch_first=True)
        self.forward = BufferedForward(model)
        T, first = self.clean_BT.shape[1], int(self.prompt_B.min())  # where the earliest answer begins
        positions = torch.arange(T, device=model.device).unsqueeze(0)
        predicted = self.forward(self.clean_BT.to(model.device), keep=T - first + 1, position_ids=positions)[:, :-1].argmax(-1).cpu()
        position = torch.arange(first, T)
        inside = (position >= self.prompt_B.unsqueeze(1)) & (position < (self.prompt_B + self.answer_B).unsqueeze(1))
        wrong = (predicted != self.clean_BT[:, first:]) & inside
        self.disagreements = int(wrong.sum())
        self.agreed_B = torch.minimum(torch.where(wrong, position, T).min(1).values - self.prompt_B, self.answer_B)


class BlockIteration:
    """All blocks, refreshed together until each equals its fixed point, or has no more unconverged tokens than its target."""

    def __init__(
        self,
        texts: CleanTexts,
        ids: Sequence[int],
        *,
        block_size: int,
        seed: int,
        rules: TokenRules,
        targets: Sequence[Sequence[int]] | None = None,  # per answer and block
    ) -> None:
        self.texts, self.n = texts, block_size
        self.prompt_B, self.answer_B, self.clean_BT = texts.prompt_B, texts.answer_B, texts.clean_BT
        batch, blocks = len(self.answer_B), -(-int(self.answer_B.max()) // block_size)
        # answer index of every block token, and the fixed point there (padding past the answer's end counts as converged)
        self.index_BNn = torch.arange(blocks * block_size).view(1, blocks, block_size).expand(batch, -1, -1)
        self.real_BNn = self.index_BNn < self.answer_B.view(-1, 1, 1)
        where = (self.prompt_B.view(-1, 1, 1) + self.index_BNn).clamp(max=self.clean_BT.shape[1] - 1)
        self.fixed_BNn = self.clean_BT.gather(1, where.flatten(1)).view_as(where)
        self.state_BNn = self._first_states(torch.tensor(list(ids)), seed, rules)
        self.enough_BN = self.real_BNn.sum(2)  # converged tokens that close a block
        for row, counts in enumerate(targets or ()):
            self.enough_BN[row, : len(counts)] -= torch.tensor(counts)
        self.history = [self.state_BNn.clone()]
        self.rows = torch.arange(batch)  # which answer each row of the cache holds

    def _first_states(self, ids: torch.Tensor, seed: int, rules: TokenRules) -> torch.Tensor:
        total_B = self.prompt_B + self.answer_B
        draftable_BT = rules.may_draft(self.clean_BT) & (torch.arange(self.clean_BT.shape[1]) < total_B.unsqueeze(1))
        pool = torch.nn.utils.rnn.pad_sequence([row[keep] for row, keep in zip(self.clean_BT, draftable_BT, strict=True)], batch_first=True)
        # how much of the pool lies before each block (blocks past an answer's end are padding)
        start_BN = (self.prompt_B.unsqueeze(1) + self.index_BNn[:, :, 0]).clamp(max=self.clean_BT.shape[1])
        size_BN = draftable_BT.long().cumsum(1).gather(1, start_BN - 1)
        guess = first_guess(pool, size_BN.unsqueeze(2), self.index_BNn, prompt_ids=ids, seed=seed, rules=rules)
        return torch.where(self.real_BNn, guess, self.fixed_BNn)

    def run(self) -> None:
        """At most block_size rounds: every forward verifies at least one more token."""
        offset = torch.arange(self.n).view(1, 1, -1)
        next_real = torch.cat([self.real_BNn[..., 1:], torch.zeros_like(self.real_BNn[..., :1])], 2)
        while True:
            converged_BN = torch.minimum(converged_prefix(self.state_BNn, self.fixed_BNn), self.real_BNn.sum(2))
            open_BN = converged_BN < self.enough_BN
            if not bool(open_BN.any()):
                return
            converged_BN1 = torch.where(open_BN, converged_BN, self.n).unsqueeze(2)
            # the first open token follows clean text only: it is the fixed point's, known without feeding it
            new = torch.where(offset == converged_BN1, self.fixed_BNn, self.state_BNn)
            # offsets c .. m-2 are fed; offset k predicts offset k+1
            fed = ((offset >= converged_BN1) & next_real).flatten(1)
            for start, stop in self._chunks(fed.sum(1)):
                self._predict(start, stop, fed, converged_BN1.squeeze(2), new)
            self.state_BNn = new
            self.history.append(new.clone())

    def _chunks(self, size_B: torch.Tensor) -> list[tuple[int, int]]:
        """Ranges of cache rows that are fed together: alike in size, so that little is padding. Sorts the rows when that has become worth it."""
        sizes = size_B[self.rows].tolist()
        chunks, padded = _alike(sizes)
        if padded > 1.2 * sum(sizes):  # seldom, since it copies the cache; rows with nothing to feed leave
            order = torch.tensor(sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i]), dtype=torch.long)
            if not len(order):
                return []
            self.texts.forward.select_rows(order.to(self.texts.forward.model.device))
            self.rows = self.rows[order]
            chunks, _ = _alike([sizes[i] for i in order])
        return chunks

    def _predict(self, start: int, stop: int, fed: torch.Tensor, converged_BN: torch.Tensor, new: torch.Tensor) -> None:
        """One forward of these cache rows over the fed [B, N*n] tokens of the current state; its predictions go into `new`."""
        rows, n = self.rows[start:stop], self.n
        fed = fed[rows]
        size_b = fed.sum(1)
        width = int(size_b.max())
        flat = fed.long().argsort(dim=1, descending=True, stable=True)[:, :width]  # [b, Q]: which state tokens are fed, in order
        block = flat // n
        ids, positions = self.state_BNn[rows].flatten(1).gather(1, flat), self.prompt_B[rows].unsqueeze(1) + flat
        # clean tokens a query may see; of the fed ones, those of its own block before it. Padding is harmless: nothing reads it
        clean_end = self.prompt_B[rows].unsqueeze(1) + block * n + converged_BN[rows].gather(1, block)
        forward = self.texts.forward.narrow(start, stop)
        visible = torch.empty(len(rows), width, forward.length + width, dtype=torch.bool)
        torch.lt(torch.arange(forward.length), clean_end.unsqueeze(2), out=visible[:, :, : forward.length])
        own = visible[:, :, forward.length :]
        torch.eq(block.unsqueeze(2), block.unsqueeze(1), out=own)
        own &= torch.ones(width, width, dtype=torch.bool).tril_()
        device = forward.model.device
        mask = model_mask(forward.model, visible.unsqueeze(1).to(device))
        predicted = forward(ids.to(device), position_ids=positions.to(device), attention_mask=mask).argmax(-1).cpu()
        row, slot = (torch.arange(width) < size_b.unsqueeze(1)).nonzero(as_tuple=True)
        new.view(len(new), -1)[rows[row], flat[row, slot] + 1] = predicted[row, slot]

    def states_of(self, row: int) -> list[torch.Tensor]:
        """Per block of one answer: its states [number of states, m], ending at the first that equals the fixed point or closed the block."""
        states, n, length = torch.stack([h[row] for h in self.history]), self.n, int(self.answer_B[row])
        blocks = []
        for i in range(-(-length // n)):
            m = min(n, length - i * n)
            block = states[:, i, :m]
            last = int((converged_prefix(block, self.fixed_BNn[row, i, :m]) >= self.enough_BN[row, i]).long().argmax())
            blocks.append(block[: last + 1].clone())
        return blocks


def _alike(sizes: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Ranges of `sizes` without those that are all 0, split where that spares padding; and the sum of their padded sizes."""
    chunks, padded, start, top = [], 0, 0, 0
    for i, size in enumerate([*sizes, None]):
        if size is None or ((i - start) * top >= FULL_FORWARD and (top - size) * (len(sizes) - i) > SPLIT_SAVES):
            if top:
                chunks.append((start, i))
                padded += (i - start) * top
            start, top = i, 0
        top = max(top, size or 0)
    return chunks, padded
