"""Tokens per forward against training tokens: the fit gives back the line it was made from, and is silent on too little."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dashboards.figures import caption, probes_by_tokens, tpf_by_tokens
from dashboards.figures.tokens import log_fit
from dashboards.report_figures import Evidence, report_figures
from tests.results import ar_row, row

TOKENS = [1000, 2000, 4000, 8000, 16000]
CURVES = [{"model": "round1", "step": 10 * i, "loss": 1.0, "consistency": 1.0, "ar": 0.5, "tokens": 1000 * i} for i in range(1, 17)]


def probes(steps: list[int], tpf: list[float], model: str = "round1") -> list[dict]:
    sound = {"equal_to_teacher": 1.0, "distinct_2": 0.5, "eos_rate": 0.75}
    return [{"model": model, "step": s, "tpf": t, **sound} for s, t in zip(steps, tpf, strict=True)]


def on_a_line(tokens: list[int]) -> list[float]:
    return [0.5 + 0.25 * float(np.log2(t)) for t in tokens]


def test_a_line_is_found_again():
    fit = log_fit(TOKENS, on_a_line(TOKENS))
    assert (fit.at_one, fit.per_doubling, fit.r2, fit.points) == (pytest.approx(0.5), pytest.approx(0.25), pytest.approx(1), 5)
    assert fit(32000) - fit(16000) == pytest.approx(0.25)
    assert str(fit) == "TPF = 0.500 + 0.250 log2(tokens) through 5 probes (R² 1.000): twice the tokens, +0.250 TPF"


def test_least_squares_on_points_off_the_line():
    """By hand: x = 0, 1, 2, 3; y = 1, 3, 2, 4 has slope 0.8, intercept 1.3 and residuals of 1.8 in 5."""
    fit = log_fit([1, 2, 4, 8], [1, 3, 2, 4])
    assert (fit.at_one, fit.per_doubling, fit.r2) == (pytest.approx(1.3), pytest.approx(0.8), pytest.approx(1 - 1.8 / 5))
    falling = log_fit([1, 2, 4, 8], [4, 3, 2, 1])
    assert falling.per_doubling == pytest.approx(-1) and "TPF = 4.000 - 1.000 log2" in str(falling) and "-1.000 TPF" in str(falling)
    assert log_fit([1, 2, 4, 8], [2, 2, 2, 2]).r2 == 1


@pytest.mark.parametrize("tokens", [[], [1, 2, 4], [0, 1, 2, 4], [5, 5, 5, 5], [1, 1, 2, 4]])
def test_too_few_points_have_no_fit(tokens: list[int]):
    assert log_fit(tokens, [float(i) for i, _ in enumerate(tokens)]) is None


def test_probes_get_the_tokens_of_their_step():
    found = probes_by_tokens(pd.DataFrame(probes([0, 5, 20, 45, 160], [1.0, 1.1, 1.2, 1.3, 1.4])), pd.DataFrame(CURVES))
    assert found["tokens"].tolist() == [500, 2000, 4500, 16000] and found["tpf"].tolist() == [1.1, 1.2, 1.3, 1.4]  # step 0 has none
    assert probes_by_tokens(pd.DataFrame(probes([0, 20], [1.0, 1.2], "round2")), pd.DataFrame(CURVES)).empty


def test_the_figure_draws_points_and_line_of_every_model():
    rows = probes([0, *(t // 100 for t in TOKENS)], [1.0, *on_a_line(TOKENS)]) + probes([20, 40], [1.0, 2.0], "round2")
    curves = CURVES + [c | {"model": "round2"} for c in CURVES]
    figure = tpf_by_tokens(probes_by_tokens(pd.DataFrame(rows), pd.DataFrame(curves)))
    assert [trace.name for trace in figure.data] == ["round1", "round1, fit", "round2"]
    assert list(figure.data[0].x) == TOKENS and list(figure.data[1].x) == [1000, 16000]
    assert list(figure.data[1].y) == pytest.approx([on_a_line(TOKENS)[0], on_a_line(TOKENS)[-1]])
    assert figure.layout.xaxis.type == "log"
    assert "twice the tokens, +0.250 TPF" in caption(figure) and "round2: too few probes for a fit." in caption(figure)


def shown(rows: list[dict], curves: list[dict]) -> dict[str, object]:
    found = report_figures({"rows": [ar_row(), row()], "parallelism": []}, Evidence(curves=curves, probes=rows))
    return {part.name: part for part in found["Training"]}


def test_the_report_says_the_fit_beside_the_probes():
    parts = shown(probes([0, *(t // 100 for t in TOKENS)], [1.0, *on_a_line(TOKENS)]), CURVES)
    assert [*parts] == ["losses", "probes", "tpf_by_tokens"]
    assert parts["tpf_by_tokens"].figure is not None
    assert "round1: TPF = 0.500 + 0.250 log2(tokens) through 5 probes (R² 1.000): twice the tokens, +0.250 TPF." in parts["tpf_by_tokens"].note
    assert "too few probes for a fit" in shown(probes([0, 20], [1.0, 1.2]), CURVES)["tpf_by_tokens"].note
    assert shown(probes([0], [1.0]), CURVES)["tpf_by_tokens"].figure is None
    assert [*shown([], CURVES)] == ["losses", "probes"]
