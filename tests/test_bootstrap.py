"""The interval of TPF: as wide as prompts differ, narrower the more there are, and the same every time."""

import random

from dashboards.bootstrap import FEWEST, tpf_interval


def test_prompts_that_agree_leave_no_doubt():
    assert tpf_interval([(60, 20)] * FEWEST) == (3.0, 3.0)
    assert tpf_interval([(60, 20)] * (FEWEST - 1)) is None


def test_more_prompts_tell_more():
    few, many = ([(60, 20 + 10 * (i % 3)) for i in range(count)] for count in (12, 120))
    (low, high), (closer_low, closer_high) = tpf_interval(few), tpf_interval(many)
    assert low < closer_low < 2 < closer_high < high
    assert tpf_interval(few) == (low, high)


def test_it_holds_the_truth_about_as_often_as_it_says():
    draw, hits = random.Random(1), 0
    for seed in range(40):
        prompts = [(60, draw.choice((20, 30, 60))) for _ in range(40)]  # 60 tokens in 36.7 forwards on average
        low, high = tpf_interval(prompts, seed=seed)
        hits += low <= 180 / 110 <= high
    assert hits >= 34
