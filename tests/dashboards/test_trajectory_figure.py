"""The trajectory view: what is accepted, stationary and wrong, and which runs are framed."""

from __future__ import annotations

import itertools

import pandas as pd

from dashboards.figures import caption, trajectory
from dashboards.figures.trajectory import STATUSES, right_runs, token_statuses

FIXED = "abcdefgh"
STATES = [
    "xxxdefxx",  # d to f are right and stay: a run of three
    "abxdefxh",  # two accepted; the h will change again
    "abcdefgx",
    FIXED,
]


def frame(states: list[str]) -> pd.DataFrame:
    return pd.DataFrame([{"iteration": i, "position": p, "id": ord(c), "text": c} for i, state in enumerate(states) for p, c in enumerate(state)])


def statuses(states: list[str]) -> list[str]:
    letters = {"wrong": ".", "passing": "p", "stationary": "s", "accepted": "A"}
    found = "".join(letters[status] for status in token_statuses(frame(states)))
    return [found[i : i + len(states[0])] for i in range(0, len(found), len(states[0]))]


def test_statuses():
    assert statuses(STATES) == ["...sss..", "AA.sss.p", "AAAAAAA.", "AAAAAAAA"]


def test_a_right_start_counts_as_accepted_at_once():
    assert statuses(["ab", "ab"]) == ["AA", "AA"]


def test_runs_of_three_right_but_unaccepted_tokens():
    tokens = frame(STATES).assign(status=token_statuses(frame(STATES)))
    assert right_runs(tokens) == [(0, 3, 5), (1, 3, 5)]
    two = frame(["xbcx", "abcd"])
    assert right_runs(two.assign(status=token_statuses(two))) == []
    mixed = frame(["xbcd", "abxd", "abcd"])  # c is right, changes, and is right again
    assert right_runs(mixed.assign(status=token_statuses(mixed))) == [(0, 1, 3)]


def test_the_figure_holds_every_token_and_frames_the_runs():
    figure = trajectory(frame(STATES))
    heatmap = figure.data[0]
    assert heatmap.z.shape == (4, 8) and [list(row) for row in heatmap.text] == [list(state) for state in STATES]
    assert heatmap.z[1].tolist() == [3, 3, 0, 2, 2, 2, 0, 1]
    assert [(shape.x0, shape.x1, shape.y0) for shape in figure.layout.shapes] == [(2.54, 5.46, -0.44), (2.54, 5.46, 0.56)]
    assert all(shape.fillcolor == "rgba(0,0,0,0)" for shape in figure.layout.shapes)  # a filled one would hide the shades
    assert [trace.name for trace in figure.data[1:]] == [
        "wrong",
        "right, but changes again",
        "stationary: right and stays, not accepted yet",
        "accepted: equal to the fixed point up to here",
        "3 or more right in a row, not accepted yet",
    ]
    assert "2 runs of 3" in caption(figure) and "trajectories stage" in caption(figure)
    assert figure.layout.yaxis.autorange == "reversed"


def test_texts_stay_texts_and_fit_their_cells():
    tokens = frame(["ab", "ab"]).assign(text=["<b>", "a\nlong one"] * 2)
    wide = trajectory(tokens).data[0]
    assert wide.text[0][0] == "&lt;b&gt;" and wide.text[0][1] == "a\u23celong\u00b7one"
    narrow = trajectory(pd.concat([tokens.assign(position=tokens["position"] + 2 * i) for i in range(20)])).data[0]
    assert narrow.text[0][1] == "a\u23ce\u2026" or len(narrow.text[0][1]) <= 3
    assert narrow.customdata[0][1][0] == "a\u23celong\u00b7one"  # whole where the mouse points


def test_shades_differ_in_grey():
    greys = sorted(0.299 * int(c[1:3], 16) + 0.587 * int(c[3:5], 16) + 0.114 * int(c[5:7], 16) for c in STATUSES.values())
    assert min(b - a for a, b in itertools.pairwise(greys)) > 25
