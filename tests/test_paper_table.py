"""The paper's tables from result rows, and accuracy under parallelism against numbers worked out by hand."""

import math

import pytest

from dashboards.paper_table import PAPER, aup, paper_rows, parallelism, title
from dashboards.table import SPREAD, STOPS, markdown_table
from tests.results import ar_row, row, trained_row

NEW = {"speedup_transformers": 1.5, "speedup_prompt_lookup": 1.25}
ROWS = [
    trained_row("round2", 64, 5.0, method="mr", tps=900.0),
    trained_row("round1", 16, 4.0, tps=800.0, accuracy=0.9) | NEW,
    trained_row("round1", 32, 4.5, tps=700.0, accuracy=0.9),
    ar_row(model="round1", tps=210.0),
    row(method="transformers", block_size=1, tps=180.0, speedup=0.9),
    row(method="prompt_lookup", block_size=11, tps=190.0, speedup=0.95),
    row(model="round1", method="prompt_lookup", block_size=11, tps=230.0),
    trained_row("cllm", 16, 3.0, tps=500.0),
    trained_row("round2", 16, 4.0, tps=850.0),
    trained_row("round2", 16, 4.0, tps=2000.0, batch_size=16),
    row(tps=150.0),
    ar_row(tps=200.0),
]


def test_a_line_is_the_best_block_of_a_model_and_method():
    lines = [(title(r), r["block_size"], r["tps"]) for r in paper_rows(ROWS)]
    assert lines == [
        ("AR", 1, 200.0),
        ("transformers' generate()", 1, 180.0),
        ("prompt lookup", 11, 190.0),
        ("Jacobi", 16, 150.0),
        ("CLLM*", 16, 500.0),
        ("Jacobi Forcing, round 1", 16, 800.0),
        ("Jacobi Forcing, round 2", 16, 850.0),
        ("Jacobi Forcing, round 2 (MR)", 64, 900.0),
    ]
    table = markdown_table(paper_rows(ROWS), PAPER).splitlines()
    assert table[0] == "| benchmark | method | block | TPF | TPS | speedup | vs transformers | vs prompt lookup | accuracy | solved |"
    assert "| minicode | Jacobi Forcing, round 1 | 16 | 4.00 | 800.0 | 2.40 | 1.50 | 1.25 | 90.0 | 180/200 |" in table
    assert len(table) == 2 + 8


def test_a_model_alone_keeps_its_baselines():
    assert [title(r) for r in paper_rows([r for r in ROWS if r["model"] == "round1"])] == [
        "Jacobi Forcing, round 1 (AR)",
        "Jacobi Forcing, round 1 (prompt lookup)",
        "Jacobi Forcing, round 1",
    ]


def test_benchmarks_stand_one_after_the_other():
    rows = [ar_row(benchmark=b) for b in ("minicode", "gsm8k")] + [row(benchmark=b) for b in ("minicode", "gsm8k")]
    assert [(r["benchmark"], r["method"]) for r in paper_rows(rows)] == [(b, m) for b in ("minicode", "gsm8k") for m in ("ar", "jacobi")]


def test_aup_by_hand():
    assert aup([(1.0, 0.8)], 0.8) == pytest.approx(80)
    assert aup([(1.0, 0.8), (3.0, 0.8)], 0.8) == pytest.approx(240)  # level: accuracy times the highest TPF
    weight = math.exp(-3 * (1 - 0.76 / 0.8))
    expected = 1.0 * 0.8 + (3.0 - 1.0) * (0.76 * weight + 0.8) / 2
    assert aup([(1.0, 0.8), (3.0, 0.76)], 0.8) == pytest.approx(100 * expected)
    assert aup([(1.0, 0.8), (3.0, 0.76), (9.0, 0.7)], 0.8) == pytest.approx(100 * expected)  # lost more than 5 points: not counted
    assert aup([(1.0, 0.4), (3.0, 0.4)], 0.8) == pytest.approx(100 * (0.4 + 2 * 0.4 * math.exp(-1.5)))  # the first point is not weighed
    assert aup([(1.0, 0.0), (2.0, 0.0)], 0.0) == 0


def test_parallelism_of_our_decoders_alone():
    rows = [*ROWS, row(model="round3", accuracy=None, accuracy_prompts=0), row(batch_size=4, tpf=50.0), row(method="prompt_lookup", tpf=40.0)]
    found = {c["model"]: c for c in parallelism(rows)}
    assert found.keys() == {"base", "cllm", "round1", "round2"}
    assert found["base"]["points"] == [[1.0, 0.95]] and found["base"]["aup"] == pytest.approx(95)
    assert found["round1"]["points"] == [[1.0, 0.95], [4.0, 0.9], [4.5, 0.9]] and found["round1"]["benchmark"] == "minicode"
    assert found["round2"]["aup"] == pytest.approx(5 * 95)  # levels: from TPF 4 down to none


def test_rows_of_older_results_are_shown_too():
    for columns in (SPREAD, STOPS):
        assert len(markdown_table([row()], columns).splitlines()) == 3
    spread = row() | {"tpf_median": 4.0, "tpf_q1": 3.0, "tpf_q3": 5.5}
    assert "4.00 [3.00, 5.50]" in markdown_table([spread], SPREAD)
    assert "| 4.00 | - |" in markdown_table([spread | {"tpf_q1": None, "tpf_q3": None}], SPREAD)  # too few values for quartiles
    stops = row(stop_reasons={"eos": 30, "length": 2}) | {"degenerate": 1, "sound_tpf": 3.5}
    assert "| 30 | 2 | 1 | 3.50 |" in markdown_table([stops], STOPS)


def test_a_variant_is_called_by_its_knobs():
    assert title({"model": "round2", "method": "mr (K=3, ngram)"}) == "Jacobi Forcing, round 2 (MR (K=3, ngram))"
    assert title({"model": "base", "method": "jacobi (ngram)"}) == "Jacobi (ngram)"
