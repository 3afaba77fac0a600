"""Unit tests of a minicode problem, from its meaning; the solution is never run."""

from __future__ import annotations

import random
from collections.abc import Callable

from tasks.problem_sets.minicode_pieces import ELEMENTS


def write_asserts(
    entry_point: str, element: Callable[[int], int | None], meaning: Callable[[list[int]], object], rng: random.Random, *, lists: int = 3
) -> str:
    """Asserts on the empty list, on numbers next to which `element` starts or stops keeping (alone and together), and on random lists.

    element(x) is the changed number or None where x is dropped; meaning(numbers) is the expected result.
    """
    kept = [x for x in ELEMENTS if element(x) is not None]
    edges = [x for x in ELEMENTS if len({element(x) is None, element(x - 1) is None, element(x + 1) is None}) == 2]
    edges = rng.sample(edges, min(len(edges), 6))
    inputs = [[], edges, *([x] for x in edges[:4])]
    for _ in range(lists):
        numbers = rng.choices(ELEMENTS, k=4) + rng.choices(kept, k=5)
        rng.shuffle(numbers)
        inputs.append(numbers)
    return "".join(f"assert {entry_point}({numbers}) == {meaning(numbers)!r}\n" for numbers in inputs)
