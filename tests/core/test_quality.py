"""Bad answers are found, each under one reason; good ones, lists and indentation among them, pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_core.trajectories.quality import REASONS, QualityRules, drop_reason, failed_tests, longest_loop

EOS = frozenset({0, 1})
VARIED = list(range(10, 110))


def judge(ids, *, ended=True, **rules):
    return drop_reason(QualityRules(**rules), ids, ended=ended, eos_ids=EOS)


def test_a_good_answer_passes_every_rule():
    assert judge([*VARIED, 0], require_eos=True) is None
    assert judge(VARIED, ended=False) is None  # cut answers are kept unless asked for


@pytest.mark.parametrize(("ids", "expected"), [([], "empty"), ([0], "empty"), ([1, 0], "empty"), ([7, 0], None)])
def test_an_answer_of_only_eos_is_empty(ids, expected):
    assert judge(ids) == expected


def test_min_tokens_counts_what_is_not_eos():
    assert judge([7, 8, 0], min_tokens=3) == "empty" and judge([7, 8, 9, 0], min_tokens=3) is None
    assert judge([0], min_tokens=0) is None


def test_no_eos_within_the_budget():
    assert judge(VARIED, ended=False, require_eos=True) == "no_eos"
    assert judge([*VARIED, 1], ended=True, require_eos=True) is None


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16])
def test_a_repeated_ngram_is_a_loop_from_the_given_length_on(n):
    ngram = list(range(500, 500 + n))
    for length, expected in ((63, None), (64, "loop"), (65, "loop")):
        stretch = (ngram * 64)[:length]
        assert judge([*VARIED, *stretch]) == expected, length
        assert judge([*stretch, *VARIED, 0]) == expected, length  # a loop that the answer left again
        assert judge([*VARIED, *stretch], loop_tokens=None) is None


def test_a_long_ngram_repeated_three_times_is_no_loop():
    assert judge(list(range(500, 540)) * 3) is None  # 40-grams, as a function and its two copies


def test_the_first_reason_is_the_one_that_counts():
    assert judge([], ended=False, require_eos=True) == "empty"
    assert judge([7] * 80, ended=False, require_eos=True) == "no_eos"
    assert REASONS == ("failed_tests", "empty", "no_eos", "loop")


def test_tests_count_only_where_the_data_has_a_score():
    rules = QualityRules(min_test_score=0.9)
    assert failed_tests(rules, 0.8) and not failed_tests(rules, 0.9) and not failed_tests(rules, None)
    assert not failed_tests(QualityRules(), 0.0)


def brute_force(ids, max_ngram):
    """Every stretch, every period, by definition."""
    best = 0
    for start in range(len(ids)):
        for stop in range(start + 1, len(ids) + 1):
            stretch = ids[start:stop]
            if any(len(stretch) >= 2 * n and all(a == b for a, b in zip(stretch, stretch[n:], strict=False)) for n in range(1, max_ngram + 1)):
                best = max(best, len(stretch))
    return best


@given(st.lists(st.integers(0, 2), max_size=14), st.integers(1, 5))
def test_the_longest_loop_is_what_a_search_of_all_stretches_finds(ids, max_ngram):
    assert longest_loop(ids, max_ngram=max_ngram) == brute_force(ids, max_ngram)


@pytest.mark.parametrize(("field", "value"), [("min_tokens", -1), ("loop_tokens", 3), ("loop_tokens", 0)])
def test_bad_rules_are_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} must"):
        QualityRules(**{field: value})
