"""Which answers are degenerate: repetition that ends only at the cap is easy to guess, and would pass for speed."""

from __future__ import annotations

from collections.abc import Sequence

from jacobi_core.trajectories.quality import LOOP_REPEATS, longest_loop

SHORTEST = 16  # tokens: a shorter stretch of repetition is a list, not a loop


def is_degenerate(tokens: Sequence[int], loop_tokens: int) -> bool:
    """One n-gram, four times or more in a row, fills `loop_tokens` tokens, or half of a shorter answer (16 tokens at least)."""
    enough = min(loop_tokens, max(SHORTEST, len(tokens) // 2))
    return longest_loop(tokens, max_ngram=enough // LOOP_REPEATS) >= enough
