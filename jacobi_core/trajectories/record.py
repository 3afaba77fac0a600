"""The trajectory of one answer, and what always holds for it. No model here.

A *state* of a block is the block after j forwards; state 0 is the first guess and the last state is the fixed point
(algorithm section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Trajectory:
    """prompt_ids: long [L]; answer_ids: long [t], greedy, EOS included; states: per block, long [number of states, m].

    m is block_size but for the last block, which ends with the answer. stop_reason: "eos", "length", or "cut" where the answer was
    ended before a token that the model did not predict again.
    """

    id: int
    prompt_ids: torch.Tensor
    answer_ids: torch.Tensor
    stop_reason: str
    block_size: int
    states: list[torch.Tensor]

    def fixed_point(self, block: int) -> torch.Tensor:
        """long [m]: what greedy AR decoding produced for this block."""
        return self.answer_ids[block * self.block_size : (block + 1) * self.block_size]

    def validate(self) -> None:
        """Raises ValueError, naming the block, where an invariant is broken."""
        n, answer = self.block_size, len(self.answer_ids)
        if answer == 0 or len(self.prompt_ids) == 0:
            raise ValueError(f"trajectory {self.id}: empty prompt or answer")
        if len(self.states) != -(-answer // n):
            raise ValueError(f"trajectory {self.id}: {len(self.states)} blocks for {answer} answer tokens at block_size {n}")
        for i, states in enumerate(self.states):
            fixed = self.fixed_point(i)
            if states.dim() != 2 or states.shape[1] != len(fixed):
                raise ValueError(f"trajectory {self.id}, block {i}: states of shape {tuple(states.shape)} for a block of {len(fixed)} tokens")
            prefixes = converged_prefix(states, fixed)
            if int(prefixes[-1]) != len(fixed) or bool((prefixes[:-1] == len(fixed)).any()):
                raise ValueError(f"trajectory {self.id}, block {i}: the fixed point is not the last state, once")
            if bool((prefixes.diff() < 1).any()):
                raise ValueError(f"trajectory {self.id}, block {i}: a forward verified no further token")


def converged_prefix(states: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
    """Leading tokens equal to the fixed point: states [..., m], fixed [m] (or broadcastable) -> long [...]."""
    return (states == fixed).long().cumprod(-1).sum(-1)
