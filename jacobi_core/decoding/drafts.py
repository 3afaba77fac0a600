"""First guesses and top-ups: random tokens of the context, keyed so that nobody's order or batch can change them.

A token is a pure function of (seed, prompt id, answer position, context): trajectories collected alone, in a batch or on
another worker start from the same guess (algorithm section 1; users' report U8).
"""

from __future__ import annotations

import torch

from jacobi_core.decoding.tokens import TokenRules

HASHED = 256  # positions whose hashes a text computes at once: one by one they cost more than the rest of a guess

_PHI = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: splitmix64's increment
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch's >> on int64 copies the sign; this is the logical shift


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function on int64 (products wrap around)."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def keyed_hash(seed: int, prompt_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Non-negative int64 hash of (seed, prompt id, position); the last two broadcast."""
    state = _mix(torch.tensor(seed, dtype=torch.long) + _PHI)
    state = _mix((state ^ prompt_ids) + _PHI)
    return _shift(_mix((state ^ positions) + _PHI), 1)


def first_guess(
    pool: torch.Tensor, pool_sizes: torch.Tensor, positions: torch.Tensor, *, prompt_ids: torch.Tensor, seed: int, rules: TokenRules
) -> torch.Tensor:
    """Random draft tokens.

    pool: long [B, P] draftable context tokens in order, right-padded; pool_sizes: long, broadcastable to positions: how many
    of a row's pool entries lie before the drafted block. positions: long [B, ...] answer index of each drafted token;
    prompt_ids: long [B]. Returns long, positions' shape. Where a row's pool is empty the whole draftable vocabulary serves.
    """
    batch = positions.shape[0]
    hashes = keyed_hash(seed, prompt_ids.view(batch, *[1] * (positions.dim() - 1)), positions)
    sizes = pool_sizes.expand_as(positions)
    vocabulary = rules.draftable.nonzero().flatten()
    fallback = vocabulary[hashes % len(vocabulary)]
    if pool.shape[1] == 0:
        return fallback
    picked = pool.gather(1, (hashes % sizes.clamp(min=1)).reshape(batch, -1)).view_as(positions)
    return torch.where(sizes > 0, picked, fallback)


class ContextDrafts:
    """Random drafts for one text while it grows."""

    def __init__(self, prompt: torch.Tensor, *, prompt_id: int, seed: int, rules: TokenRules, capacity: int) -> None:
        """prompt: long [L] on any device; capacity: most answer tokens that will be appended."""
        prompt = prompt.cpu()
        start = prompt[rules.may_draft(prompt)]
        self._pool = torch.empty(1, len(start) + capacity, dtype=torch.long)
        self._pool[0, : len(start)] = start
        self._size = len(start)
        self._id, self._seed, self._rules = torch.tensor([prompt_id]), seed, rules
        self._hashes: dict[int, tuple[int, torch.Tensor]] = {}  # by stream: first position, hashes from there on

    def append(self, tokens: torch.Tensor) -> None:
        """Committed answer tokens, long [k], become context to draw from."""
        kept = tokens[self._rules.may_draft(tokens)]
        self._pool[0, self._size : self._size + len(kept)] = kept
        self._size += len(kept)

    def draw(self, start: int, count: int, *, stream: int = 0) -> torch.Tensor:
        """Guesses for answer positions start .. start+count-1, long [count] on the CPU; other streams guess otherwise."""
        if not self._size:
            positions = self._positions(start, count, stream).unsqueeze(0)
            return first_guess(self._pool, torch.tensor(0), positions, prompt_ids=self._id, seed=self._seed, rules=self._rules)[0]
        first, hashes = self._hashes.get(stream, (0, self._id[:0]))
        if start < first or start + count > first + len(hashes):
            first, hashes = start, keyed_hash(self._seed, self._id, self._positions(start, max(count, HASHED), stream))
            self._hashes[stream] = first, hashes
        return self._pool[0, hashes[start - first : start - first + count] % self._size]

    @staticmethod
    def _positions(start: int, count: int, stream: int) -> torch.Tensor:
        return torch.arange(start, start + count) + (stream << 40)
