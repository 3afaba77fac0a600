"""Which answers are worth training on, and if not, why. Pure functions over token ids; knows neither model nor text.

An answer is judged once, before its Jacobi states are computed: a dropped one costs no states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

REASONS = ("failed_tests", "empty", "no_eos", "loop")  # in the order they are looked for: an answer has the first that holds
LOOP_REPEATS = 4  # an n-gram counts as a loop when it fills `loop_tokens` with at least so many copies of itself


@dataclass
class QualityRules:
    """Raises ValueError naming the field for a value that cannot be used."""

    min_tokens: int = 1  # an answer with fewer, EOS not counted, is "empty"
    require_eos: bool = False  # an answer cut at max_new_tokens is "no_eos"
    loop_tokens: int | None = 64  # so many tokens in a row that only repeat one n-gram (4 times or more) are a "loop"; None: never
    min_test_score: float | None = None  # prompts whose data has a lower test score are "failed_tests"; those without a score pass

    def __post_init__(self) -> None:
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must not be negative, got {self.min_tokens}")
        if self.loop_tokens is not None and self.loop_tokens < LOOP_REPEATS:
            raise ValueError(f"loop_tokens must be at least {LOOP_REPEATS} (or null: loops are kept), got {self.loop_tokens}")


def drop_reason(rules: QualityRules, answer_ids: Sequence[int], *, ended: bool, eos_ids: Collection[int]) -> str | None:
    """The first of "empty", "no_eos", "loop" that holds for an answer, None for a good one.

    ended: it stopped by an EOS, which then is its last token.
    """
    if sum(token not in eos_ids for token in answer_ids) < rules.min_tokens:
        return "empty"
    if rules.require_eos and not ended:
        return "no_eos"
    if rules.loop_tokens is not None and longest_loop(answer_ids, max_ngram=rules.loop_tokens // LOOP_REPEATS) >= rules.loop_tokens:
        return "loop"
    return None


def failed_tests(rules: QualityRules, test_score: float | None) -> bool:
    """Reason "failed_tests". test_score: what the data says of the prompt's tests; known before the answer, so the prompt is never decoded."""
    return rules.min_test_score is not None and test_score is not None and test_score < rules.min_test_score


def longest_loop(ids: Sequence[int], *, max_ngram: int) -> int:
    """Tokens of the longest stretch that repeats one n-gram of up to `max_ngram` tokens, the first copy included; 0 where nothing repeats."""
    longest = 0
    for n in range(1, max_ngram + 1):
        run = 0
        for before, token in zip(ids, ids[n:], strict=False):
            run = run + 1 if token == before else 0
            if run + n > longest and run >= n:
                longest = run + n
    return longest
