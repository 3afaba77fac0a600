"""The figures show the given numbers, name their axes with units, and can be told apart without colour."""

from xml.etree import ElementTree

import pandas as pd
import pytest

from dashboards import figures
from dashboards.figures import (
    accuracy_under_parallelism,
    caption,
    described,
    latency,
    probe_curves,
    runs_pareto,
    speed_accuracy,
    tpf_by_block_size,
    training_curves,
)
from dashboards.figures.results import pareto_front
from dashboards.static import svg
from dashboards.sweep_figures import comparison, noise_histograms
from tests.results import ar_row, row, trained_row

ROWS = pd.DataFrame(
    [
        ar_row(),
        row(),
        ar_row(model="round1"),
        trained_row("round1", 64, 5.0, accuracy=0.97),
        trained_row("round1", 16, 4.0, accuracy=0.97),
        trained_row("round1", 32, 4.5, accuracy=None),
    ]
)
CURVES = pd.DataFrame(
    [
        {"model": model, "step": step, "loss": 1.0, "consistency": 2.0 / step, "ar": 0.5, "learning_rate": 1e-4, "tokens": 500_000 * step}
        for model in ("round1", "round2")
        for step in (1, 2)
    ]
)


def titles(figure) -> list[str]:
    return [axis.title.text for axis in [*figure.select_xaxes(), *figure.select_yaxes()]]


def test_speed_accuracy():
    figure = speed_accuracy(ROWS)
    assert [trace.name for trace in figure.data] == ["Pareto front", "base", "round1"]
    front, base, round1 = figure.data
    assert list(front.x) == [3.0] and list(front.y) == [97.0]
    assert list(base.text) == ["AR", "16"] and list(round1.text) == ["", "16", "64"]  # AR is named once; without an accuracy there is no point
    assert list(round1.y) == [95.0, 97.0, 97.0]
    assert [round(x, 6) for x in round1.x] == [1.0, 2.4, 3.0]
    assert base.textposition != round1.textposition
    assert "%" in titles(figure)[1] and "wall clock" in titles(figure)[0]


def test_points_of_other_methods_are_named_by_them():
    rows = pd.DataFrame([row(speedup=1.0), row(method="mr", speedup=3.0), row(method="mr (K=3)", speedup=2.0)])
    assert sorted(speed_accuracy(rows).data[1].text) == ["16", "mr (K=3) 16", "mr 16"]


def test_points_on_top_of_each_other_share_a_label():
    rows = pd.DataFrame([ar_row(), *(row(block_size=b, speedup=s) for b, s in ((16, 3.0), (32, 3.95), (64, 3.94)))])
    points = speed_accuracy(rows).data[1]
    assert list(points.text) == ["AR", "16", "", "64, 32"] and list(points.customdata) == ["AR", "16", "32", "64"]


def test_speed_accuracy_without_any_accuracy():
    assert len(speed_accuracy(ROWS.assign(accuracy=None)).data) == 0


def test_tpf_by_block_size():
    figure = tpf_by_block_size(ROWS)
    lines = {trace.name: trace for trace in figure.data}
    assert lines.keys() == {"base", "round1"}
    assert list(lines["round1"].x) == [16, 32, 64] and list(lines["round1"].y) == [4.0, 4.5, 5.0]
    assert list(figure.layout.xaxis.tickvals) == [16, 32, 64]
    assert "tokens per forward" in titles(figure)[1]


def test_tpf_of_several_runs_shows_their_range():
    rows = ROWS[ROWS["method"] != "ar"]
    figure = tpf_by_block_size(rows.assign(tpf_low=rows["tpf"] - 0.5, tpf_high=rows["tpf"] + 0.25))
    assert all(set(trace.error_y.array) == {0.25} and set(trace.error_y.arrayminus) == {0.5} for trace in figure.data)
    assert all(trace.error_y.array is None for trace in tpf_by_block_size(rows).data)


def test_a_static_figure_is_well_formed_text_and_always_the_same():
    rows = pd.concat([ROWS, pd.DataFrame([row(model=name, block_size=32, tpf=2.5) for name in ("round2", "round3", "round4", "CLLM*")])])
    figure = tpf_by_block_size(rows.assign(tpf_low=rows["tpf"] - 0.5, tpf_high=rows["tpf"] + 0.5))
    text = svg(figure)
    root = ElementTree.fromstring(text)
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert words >= {"base", "round1", "CLLM*", "16", "32", "64", "greedy AR", *titles(figure)}
    assert svg(figure) == text and svg(tpf_by_block_size(rows)) != text
    assert "<script" not in text and "<image" not in text


def test_tpf_tells_methods_apart():
    figure = tpf_by_block_size(pd.concat([ROWS, pd.DataFrame([row(method="multiblock", tpf=2.0)])]))
    symbols = {trace.name: trace.marker.symbol for trace in figure.data}
    assert symbols.keys() == {"base, jacobi", "round1, jacobi", "base, multiblock"}
    assert len(set(symbols.values())) == 3


def test_training_curves():
    figure = training_curves(CURVES)
    assert [trace.name for trace in figure.data] == ["round1", "round1", "round2", "round2"]
    assert list(figure.data[0].x) == [0.5, 1.0] and list(figure.data[0].y) == [2.0, 1.0]
    assert [trace.name for trace in figure.data if trace.showlegend] == ["round1", "round2"]
    assert all("nats" in title for title in titles(figure)[2:]) and all("millions" in title for title in titles(figure)[:2])


def test_a_model_looks_the_same_in_every_figure():
    looks = {trace.line.dash for trace in [*tpf_by_block_size(ROWS).data, *training_curves(CURVES).data] if trace.name == "round1"}
    assert looks == {"dash"}


def test_models_differ_without_colour():
    figure = tpf_by_block_size(ROWS)
    names = ["base", "round1", "round2", "round3", "cllm"]
    many = tpf_by_block_size(pd.DataFrame([row(model=name) for name in names]))
    assert len({trace.line.dash for trace in many.data}) == len({trace.marker.symbol for trace in many.data}) == len(names)
    assert len({trace.line.dash for trace in figure.data}) == len({trace.marker.symbol for trace in figure.data}) == 2
    assert len({trace.marker.symbol for trace in speed_accuracy(ROWS).data[1:]}) == 2
    assert len({trace.line.dash for trace in training_curves(CURVES).data}) == 2


def test_accuracy_under_parallelism():
    curves = pd.DataFrame(
        [
            {"model": "base", "points": [[1.0, 0.95], [1.2, 0.95]], "aup": 114.0},
            {"model": "round1", "points": [[1.0, 0.9], [4.0, 0.9]], "aup": 300.4},
        ]
    )
    figure = accuracy_under_parallelism(curves)
    assert [trace.name for trace in figure.data] == ["base, AUP 114", "round1, AUP 300"]
    assert list(figure.data[1].x) == [1, 4] and list(figure.data[1].y) == [90, 90] and figure.layout.yaxis.range[0] == 80
    assert titles(figure) == ["TPF (tokens per forward)", "accuracy (% of problems solved)"]


PROBES = pd.DataFrame(
    [
        {"model": model, "step": step, "tpf": 1.0 + step, "equal_to_teacher": 1.0, "distinct_2": 0.5, "eos_rate": 0.75}
        for model in ("round1", "round2")
        for step in (0, 4)
    ]
)


def test_probe_curves():
    figure = probe_curves(PROBES)
    assert [trace.name for trace in figure.data if trace.showlegend] == ["round1", "round2"] and len(figure.data) == 8
    assert [list(trace.y) for trace in figure.data[:4]] == [[1, 5], [1, 1], [0.5, 0.5], [0.75, 0.75]]
    assert {trace.line.dash for trace in figure.data} == {"dash", "dot"} and len({trace.yaxis for trace in figure.data}) == 4


def curves(**changes) -> list[dict]:
    one = {"tokens": [1, 2, 4], "seconds": [0.002, 0.002, 0.003], "free_tokens": 2, "knee": 4.0}
    return [one | {"batch_size": b, "context": c} | changes for b in (1, 4) for c in (128, 1024)]


def test_latency():
    figure = latency(curves())
    assert [trace.name for trace in figure.data] == [f"batch {b}, context {c}: 2.00 ms, 2 free" for b in (1, 4) for c in (128, 1024)]
    assert list(figure.data[0].x) == [1, 2, 4] and list(figure.data[0].y) == [1, 1, 1.5]
    assert len({(trace.marker.symbol, trace.line.dash) for trace in figure.data}) == 4
    assert "of one token" in titles(figure)[1]


def test_a_knee_that_was_reached_is_marked():
    figure = latency(pd.DataFrame(curves(knee=2.5)[:2]))
    knee = figure.data[-1]
    assert knee.name == "knee" and list(knee.x) == [2.5, 2.5] and list(knee.y) == [1, 1]
    assert "Knee" in caption(figure)


def test_the_pareto_front_is_what_none_beats_in_both():
    rows = pd.DataFrame(
        [
            {"run": run, "model": "base", "method": "jacobi", "block_size": block, "speedup": speedup, "accuracy": accuracy}
            for run, block, speedup, accuracy in [
                ("a", 1, 1.0, 0.97),
                ("a", 16, 2.0, 0.9),
                ("b", 16, 3.0, 0.95),
                ("b", 32, 3.0, 0.95),
                ("b", 64, 2.5, 0.96),
            ]
        ]
    )
    assert pareto_front(rows)["block_size"].tolist() == [1, 64, 16]  # slowest first; of equal ones the first
    figure = runs_pareto(pd.concat([rows, rows.assign(accuracy=None)]))
    front, a, b = figure.data
    assert list(front.x) == [1.0, 2.5, 3.0] and list(front.y) == [97, 96, 95]
    assert (a.name, b.name) == ("a", "b") and len(a.x) == 2 and a.marker.symbol != b.marker.symbol
    assert [note.text for note in figure.layout.annotations] == ["base jacobi@1", "base jacobi@64", "base jacobi@16"]


def test_many_runs_are_told_apart_without_colour():
    many = pd.DataFrame([{"run": f"r{i}", "model": "m", "method": "ar", "block_size": 1, "speedup": 1.0, "accuracy": 0.5} for i in range(12)])
    assert len({trace.marker.symbol for trace in runs_pareto(many).data[1:]}) == 12


@pytest.mark.parametrize("figure", [speed_accuracy(ROWS), tpf_by_block_size(ROWS), training_curves(CURVES), probe_curves(PROBES), latency(curves())])
def test_every_figure_says_where_its_numbers_come_from_also_to_those_who_do_not_see_it(figure):
    assert ".json" in caption(figure)
    html = described(figure, 'A "title"')
    assert f"<figcaption>{caption(figure)}</figcaption>" in html.replace("&#x27;", "'") and 'aria-label="A &quot;title&quot;. ' in html


def test_all_figures_are_exported():
    assert set(figures.__all__) <= set(dir(figures))


def test_a_sweeps_jobs_stand_beside_the_papers_numbers_and_a_failed_one_keeps_its_place():
    measured = {"common_tpf": 2.0, "common_tpf_interval": (1.5, 2.75), "common_speedup": 1.5, "accuracy": 0.9, "paper": {"tpf": 2.2, "accuracy": 0.8}}
    failed = {"common_tpf": None, "common_speedup": None, "accuracy": None, "paper": None}
    figure = comparison([("linear, 8", measured), ("random, 8", failed)])
    assert [(trace.name, list(trace.y)) for trace in figure.data] == [
        ("here", [2.0, None]),
        ("paper", [2.2, None]),
        ("here", [1.5, None]),
        ("here", [90.0, None]),
        ("paper", [80.0, None]),
    ]
    whiskers = figure.data[0].error_y
    assert (whiskers.arrayminus[0], whiskers.array[0]) == (0.5, 0.75) and all(trace.error_y.array is None for trace in figure.data[1:])
    assert {trace.marker.pattern.shape for trace in figure.data if trace.name == "paper"} == {"/"}
    assert list(figure.layout.xaxis.categoryarray) == ["linear, 8", "random, 8"]


def test_noise_histograms_are_shares_of_blocks():
    noise = {"edges": [0.0, 0.5, 1.0], "counts": [2, 0, 6]}
    figure = noise_histograms([(str(number), noise) for number in range(4)])
    assert len(figure.data) == 4 and list(figure.data[3].y) == [25.0, 0.0, 75.0]
    assert figure.data[3].yaxis == "y4"  # the fourth begins a second line
