"""Acceptance in figures: the shares are the decoder's own, and a step is as wide and high as what its forward committed."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from dashboards.figures import acceptance_shares, accepted_along, accepted_by_position, caption
from jacobi_core.decoding.stats import DecodingStats


def test_shares_are_those_of_the_decoders_statistics():
    stats = DecodingStats(committed_per_forward=[1, 1, 3, 9, 2, 3])
    assert acceptance_shares(Counter(stats.committed_per_forward)) == stats.accepted_by_position()
    assert acceptance_shares({1: 7}) == [0.0]  # nothing accepted is something to show


def test_acceptance_by_position_has_a_line_per_model():
    shares = pd.DataFrame([{"model": m, "position": k, "share": s / k} for m, s in (("base", 0.1), ("round1", 0.5), ("round2", 0.9)) for k in (1, 2)])
    figure = accepted_by_position(shares)
    assert [(trace.name, list(trace.x), list(trace.y)) for trace in figure.data] == [
        ("base", [1, 2], [10, 5]),
        ("round1", [1, 2], [50, 25]),
        ("round2", [1, 2], [90, 45]),
    ]
    assert len({trace.line.dash for trace in figure.data}) == len({trace.marker.symbol for trace in figure.data}) == 3
    assert "evaluation.json" in caption(figure)


def test_along_an_answer_every_step_is_one_forward():
    rows = [("AR", 1, "draft")] * 3 + [("mr", 2, "draft"), ("mr", 1, "ngram")]
    figure = accepted_along(pd.DataFrame(rows, columns=["name", "committed", "source"]))
    ar, mr = figure.data
    assert (list(ar.x), list(ar.y)) == ([0, 1, 2, 3], [1, 1, 1, 1]) and (list(mr.x), list(mr.y)) == ([0, 2, 3], [2, 1, 1])
    assert mr.line.shape == "hv" and ar.line.dash != mr.line.dash
    assert mr.name == "mr: 3 tokens in 2 forwards" and [list(told) for told in mr.customdata[:2]] == [[1, "draft"], [2, "ngram"]]
