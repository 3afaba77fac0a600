"""Trajectories of many prompts at once: a batched greedy answer, then the Jacobi states of all its blocks together.

The fixed points of all blocks are the greedy answer, so every block can iterate at the same time against the clean prefix
before it (algorithm section 2b). A converged prefix has the clean tokens' keys and values, so only what follows it is fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import CachedForward, model_mask
from jacobi_core.decoding.drafts import first_guess
from jacobi_core.decoding.greedy_batch import greedy_batch
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.trajectories.record import Trajectory, converged_prefix


@dataclass(frozen=True)
class Collected:
    """disagreements: answer tokens that the teacher-forced forward did not predict again (0 in fp64; near-ties else)."""

    trajectories: list[Trajectory]
    disagreements: int


@torch.inference_mode()
def collect(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    prompt_ids: Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    seed: int,
    rules: TokenRules,
) -> Collected:
    """Greedy answers and all their Jacobi states. prompts: token ids; prompt_ids: the stable id of each, keys its first guesses.

    In fp64 equal to decoding each prompt alone, block by block. Raises ValueError for an empty prompt, one that does not fit
    the context, or block_size < 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    answers = greedy_batch(model, prompts, max_new_tokens=max_new_tokens, rules=rules)
    iteration = _BlockIteration(
        model, [torch.as_tensor(p) for p in prompts], [a.tokens for a in answers], prompt_ids, block_size=block_size, seed=seed, rules=rules
    )
    iteration.run()
    trajectories = [
        Trajectory(prompt_id, torch.as_tensor(prompt), answer.tokens, answer.stop_reason, block_size, iteration.states_of(row))
        for row, (prompt_id, prompt, answer) in enumerate(zip(prompt_ids, prompts, answers, strict=True))
    ]
    return Collected(trajectories, iteration.disagreements)


class _BlockIteration:
    """All blocks of a batch of answers, refreshed together until each equals its fixed point.

    Shape legend: B answers, N blocks of the longest, n block size, T prompt+answer tokens of the longest, Q tokens fed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: list[torch.Tensor],
        answers: list[torch.Tensor],
        ids: Sequence[int],
        *,
        block_size: int,
        seed: int,
        rules: TokenRules,
    ) -> None:
        self.model, n = model, block_size
        batch, blocks = len(prompts), max(-(-len(a) // n) for a in answers)
        self.prompt_B = torch.tensor([len(p) for p in prompts])
        self.answer_B = torch.tensor([len(a) for a in answers])
        self.clean_BT = torch.nn.utils.rnn.pad_sequence([torch.cat([p, a]) for p, a in zip(prompts, answers, strict=True)], batch_first=True)
        # answer index of every block token, and the fixed point there (padding past the answer's end counts as converged)
        self.index_BNn = torch.arange(blocks * n).view(1, blocks, n).expand(batch, -1, -1)
        self.real_BNn = self.index_BNn < self.answer_B.view(-1, 1, 1)
        where = (self.prompt_B.view(-1, 1, 1) + self.index_BNn).clamp(max=self.clean_BT.shape[1] - 1)
        self.fixed_BNn = self.clean_BT.gather(1, where.flatten(1)).view_as(where)
        self.state_BNn = self._first_states(torch.tensor(list(ids)), seed, rules)
        self.history = [self.state_BNn.clone()]
        self.disagreements = 0

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
        """Iterate to the fixed points. At most block_size rounds: every forward verifies at least one more token."""
        device = self.model.device
        forward = CachedForward(self.model)
        logits = forward(self.clean_BT.to(device), position_ids=torch.arange(self.clean_BT.shape[1], device=device).unsqueeze(0))
        self._count_disagreements(logits.argmax(-1).cpu())
        del logits
        rows, clean_length = torch.arange(len(self.clean_BT)), forward.length
        while True:
            converged_BN = converged_prefix(self.state_BNn, self.fixed_BNn)
            open_BN = converged_BN < self.state_BNn.shape[2]
            if not bool(open_BN.any()):
                return
            alive = open_BN[rows].any(1)
            if int(alive.sum()) <= 0.5 * len(rows):  # finished answers leave; seldom, since it copies the cache
                forward.select_rows(alive.nonzero().flatten().to(device))
                rows = rows[alive]
            self._refresh(forward, rows, converged_BN)
            forward.rollback(clean_length)
            self.history.append(self.state_BNn.clone())

    def _count_disagreements(self, predicted_BT: torch.Tensor) -> None:
        position = torch.arange(predicted_BT.shape[1]).unsqueeze(0)
        inside = (position >= self.prompt_B.unsqueeze(1) - 1) & (position < (self.prompt_B + self.answer_B).unsqueeze(1) - 1)
        self.disagreements = int(((predicted_BT[:, :-1] != self.clean_BT[:, 1:]) & inside[:, :-1]).sum())

    def _refresh(self, forward: CachedForward, rows: torch.Tensor, converged_BN: torch.Tensor) -> None:
        """One Jacobi iteration of the given answers: state <- predictions from state, in one forward."""
        state, fixed, real = self.state_BNn[rows], self.fixed_BNn[rows], self.real_BNn[rows]
        converged = converged_BN[rows].unsqueeze(2)
        offset = torch.arange(state.shape[2]).view(1, 1, -1)
        # the first open token follows clean text only: it is the fixed point's, known without feeding it
        new = torch.where(offset == converged, fixed, state)
        # offsets c .. m-2 are fed; offset k predicts offset k+1
        next_real = torch.cat([real[..., 1:], torch.zeros_like(real[..., :1])], 2)
        fed = (offset >= converged) & next_real
        if bool(fed.any()):
            batch, _, n = state.shape
            slots = fed.flatten(1).long().cumsum(1) - 1  # where each fed token goes on the packed axis
            width = int(slots[:, -1].max()) + 1
            row, flat = fed.flatten(1).nonzero(as_tuple=True)
            slot = slots[row, flat]
            block = flat // n
            prompt = self.prompt_B[rows]

            def spread(values: torch.Tensor, fill: int) -> torch.Tensor:
                out = torch.full((batch, width), fill, dtype=torch.long)
                out[row, slot] = values
                return out

            ids = spread(state.flatten(1)[row, flat], 0)
            positions = spread(prompt[row] + flat, 0)
            blocks_of = spread(block, -1)
            clean_end = spread(prompt[row] + block * n + converged[row, block, 0], 1)  # clean tokens a query may see; padding sees one
            clean = torch.arange(forward.length).view(1, 1, -1) < clean_end.unsqueeze(2)
            order = torch.arange(width)
            own = (blocks_of.unsqueeze(2) == blocks_of.unsqueeze(1)) & (order.view(1, -1, 1) >= order.view(1, 1, -1))
            visible = torch.cat([clean, own], 2).unsqueeze(1)
            device = self.model.device
            logits = forward(ids.to(device), position_ids=positions.to(device), attention_mask=model_mask(self.model, visible.to(device)))
            predicted = logits.argmax(-1).cpu()
            new.flatten(1)[row, flat + 1] = predicted[row, slot]
        self.state_BNn[rows] = new

    def states_of(self, row: int) -> list[torch.Tensor]:
        """Per block of one answer: its states [number of states, m], ending at the first that equals the fixed point."""
        states, n, length = torch.stack(self.history), self.state_BNn.shape[2], int(self.answer_B[row])
        blocks = []
        for i in range(-(-length // n)):
            m = min(n, length - i * n)
            block = states[:, row, i, :m]
            last = int((converged_prefix(block, self.fixed_BNn[row, i, :m]) == m).long().argmax())
            blocks.append(block[: last + 1].clone())
        return blocks
