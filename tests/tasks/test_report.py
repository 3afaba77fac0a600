"""The report stage: the results contract, and pages that stay safe and offline whatever a model wrote."""

import json
import math
import re
import subprocess
import sys

import pytest
from plotly.offline import get_plotlyjs

from tasks.machine import git_sha, hardware
from tasks.report import ReportConfig, render_table, run
from tasks.stage import StageContext, UserError
from tests.results import MACHINE, ar_row, row, trained_row, write_evaluation, write_training

CONTRACT = {"schema_version", "experiment", "git_sha", "hardware", "versions", "timed_on", "final_model", "rows", "differences", "parallelism"}
HOSTILE = "print('<script>alert(1)</script>')"
TIE = {"problem_id": "minicode/3", "method": "jacobi", "block_size": 16, "batch_size": 4, "first_index": 12, "margin": 2e-6, "kind": "tie"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report over base, two rounds and the baseline, given in a shuffled order; (output folder, metrics)."""
    root = tmp_path_factory.mktemp("run")
    sample = {"problem_id": "minicode/3", "prompt": "Say <b>hi</b>", "ar": HOSTILE, "jacobi": HOSTILE + "!", "judged_by": "tests", "passed": False}
    inputs = {
        "evaluate/cllm": write_evaluation(root / "c", "cllm", [trained_row("cllm", 16, 3.0)]),
        "evaluate/round2": write_evaluation(root / "2", "round2", [ar_row(model="round2"), trained_row("round2", 64, 5.0, accuracy=0.94)]),
        "evaluate/round1": write_evaluation(
            root / "1", "round1", [trained_row("round1", 16, 4.0, equals_ar=31 / 32)], differences=[TIE], samples=[sample]
        ),
        "evaluate/base": write_evaluation(root / "b", "base", [ar_row(), row()]),
        "distill/round1": write_training(root / "d1"),
        "distill/round2": write_training(root / "d2"),
        "export/final": root / "export",
    }
    output = root / "out"
    output.mkdir()
    return output, run(ReportConfig(experiment="quickstart"), inputs, output, StageContext()), root


def test_results_json_keeps_the_contract(report):
    output, _, root = report
    results = json.loads((output / "results.json").read_text())
    assert results.keys() == CONTRACT
    assert results["schema_version"] == 1
    assert results["experiment"] == "quickstart"
    assert results["final_model"] == str(root / "export")
    assert [(line["model"], line["method"], line["block_size"]) for line in results["rows"]] == [
        ("base", "ar", 1),
        ("base", "jacobi", 16),
        ("round1", "jacobi", 16),
        ("round2", "ar", 1),
        ("round2", "jacobi", 64),
        ("cllm", "jacobi", 16),
    ]
    assert results["rows"][1] == row()  # rows are passed on untouched
    assert results["differences"] == [{"model": "round1", "benchmark": "minicode"} | TIE]


def test_metrics_are_flat_numbers(report):
    _, metrics, _ = report
    assert metrics["rows"] == 6 and metrics["ties"] == 1 and metrics["defects"] == 0
    assert metrics["round2/minicode/best_tpf"] == 5.0
    assert metrics["round2/minicode/best_speedup"] == pytest.approx(3.0)
    assert metrics["base/minicode/best_speedup"] == 1.0
    assert metrics["round2/minicode/aup"] == pytest.approx(95 + 4 * (95 + 94 * math.exp(-3 * (1 - 94 / 95))) / 2)
    assert metrics["round1/minicode/accuracy"] == 0.95
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_a_model_on_several_benchmarks(tmp_path):
    """Model by model, of each in the order in which they were asked for."""
    inputs = {}
    for model in ("round10", "base", "round2"):
        for benchmark, version in ((None, None), ("mbpp", 1.0), ("gsm8k", 1.0)):
            rows = [r | {"benchmark": benchmark or "mine", "benchmark_version": version} for r in (ar_row(model=model), row(model=model))]
            name = "/".join(filter(None, ("evaluate", model, benchmark)))
            inputs[name] = write_evaluation(tmp_path / name, model, rows)
    run(ReportConfig(experiment="x"), inputs | {"export/final": tmp_path}, tmp_path, StageContext())
    results = json.loads((tmp_path / "results.json").read_text())
    made = list(dict.fromkeys((r["model"], r["benchmark"]) for r in results["rows"]))
    assert made == [(model, benchmark) for model in ("base", "round2", "round10") for benchmark in ("mine", "mbpp", "gsm8k")]
    assert [found["models"] for found in results["timed_on"]] == [["base", "round2", "round10"]]
    note = "Benchmark versions: mbpp 1.0, gsm8k 1.0."
    assert note in (tmp_path / "results.md").read_text() and note in (tmp_path / "report.html").read_text() and note in render_table(results["rows"])


def test_headlines_are_of_our_decoder_alone(tmp_path):
    others = [row(method="prompt_lookup", block_size=11, tpf=9.0, speedup=9.0), row(batch_size=4, tpf=8.0, speedup=8.0)]
    theirs = {
        "problem_id": "minicode/3",
        "method": "transformers",
        "block_size": 1,
        "batch_size": 1,
        "first_index": 2,
        "margin": 0.5,
        "kind": "defect",
    }
    inputs = {"evaluate/base": write_evaluation(tmp_path / "b", "base", [ar_row(), row(), *others], differences=[theirs]), "export/final": tmp_path}
    metrics = run(ReportConfig(experiment="x"), inputs, tmp_path, StageContext())
    assert metrics["base/minicode/best_tpf"] == 1.0 and metrics["base/minicode/best_speedup"] == 1.0 and metrics["defects"] == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td class=left>prompt_lookup</td>") == 3  # in the tables of all settings


def test_what_was_found_out_about_the_machine_is_shown(tmp_path):
    trial = {"prompts": 8, "tokens": 400, "forwards": 100, "tpf": 4.0, "tps": 812.0}
    search = {
        "model": "round2",
        "winner": "mr@32 (r=0.3)",
        "rounds": [[], [{"name": "mr@32 (r=0.3)", **trial}]],
        "heldout": [{"name": "<ar@1>", **trial}],
    }
    curve = {"batch_size": 4, "context": 128, "tokens": [1, 2], "seconds": [0.001, 0.002], "beside": 0.0, "knee": 1.0, "free_tokens": 1}
    for name, content in {"search": search, "latency": {"dtype": "float32", "free_ratio": 1.1, "curves": [curve]}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(json.dumps(content))
    inputs = {"evaluate/base": write_evaluation(tmp_path / "b", "base", [ar_row(), row()]), "export/final": tmp_path}
    run(ReportConfig(experiment="x"), inputs | {"search": tmp_path / "search", "latency": tmp_path / "latency"}, tmp_path, StageContext())
    results, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "report.html").read_text()
    assert results["search"] == search and results["latency"]["curves"] == [curve]
    assert "| mr@32 (r=0.3) | 8 | 400 | 4.00 | 812.0 |" in (tmp_path / "results.md").read_text()
    assert "batch 4, context 128: 1.00 ms, 1 free" in page and "&lt;ar@1&gt;" in page and "<ar@1>" not in page


def test_speed_is_said_to_be_of_the_machine_that_measured_it(tmp_path):
    other = MACHINE | {"cpu": "<another CPU>", "gpus": ["a GPU"], "device": "cuda", "torch_threads": 8}
    inputs = {
        "evaluate/base": write_evaluation(tmp_path / "b", "base", [ar_row(), row()]),
        "evaluate/round1": write_evaluation(tmp_path / "1", "round1", [ar_row(model="round1")], machine=other),
        "evaluate/cllm": write_evaluation(tmp_path / "c", "cllm", [trained_row("cllm", 16, 3.0)]),
        "export/final": tmp_path,
    }
    run(ReportConfig(experiment="x"), inputs, tmp_path, StageContext())
    found = json.loads((tmp_path / "results.json").read_text())["timed_on"]
    assert found == [{"models": ["base", "cllm"], "machine": MACHINE}, {"models": ["round1"], "machine": other}]
    text, page = (tmp_path / "results.md").read_text(), (tmp_path / "report.html").read_text()
    assert "Speed of base, cllm measured on a CPU, 2 cores, no GPU (device cpu, 2 threads, torch 2.13.0+cpu)." in text
    assert "Speed of round1 measured on <another CPU>, 2 cores, a GPU (device cuda, 8 threads, torch 2.13.0+cpu)." in text
    assert hardware()["cpu"] not in text  # of whoever wrote the report
    assert "Speed of base, cllm measured on a CPU" in page and "&lt;another CPU&gt;" in page


@pytest.mark.parametrize(
    ("judged_by", "passed", "says"),
    [
        ("tests", True, "tests passed"),
        ("tests", False, "tests failed"),
        ("answer", True, "answer right"),
        ("answer", False, "answer wrong"),
        (None, None, "nothing to judge it by"),
    ],
)
def test_a_sample_says_how_it_was_judged(tmp_path, judged_by, passed, says):
    sample = {"problem_id": "p", "prompt": "q", "ar": "a", "jacobi": "a", "judged_by": judged_by, "passed": passed}
    inputs = {"evaluate/base": write_evaluation(tmp_path / "b", "base", [ar_row()], samples=[sample]), "export/final": tmp_path}
    run(ReportConfig(experiment="x"), inputs, tmp_path, StageContext())
    assert f"<p class=note>same text, {says}</p>" in (tmp_path / "report.html").read_text()


def test_prompts_that_were_not_judged_are_told(tmp_path):
    inputs = {"evaluate/base": write_evaluation(tmp_path / "b", "base", [ar_row() | {"unjudged": 3}]), "export/final": tmp_path}
    run(ReportConfig(experiment="x"), inputs, tmp_path, StageContext())
    for file in ("results.md", "report.html"):
        assert "3 prompts of minicode bring neither tests nor an answer" in (tmp_path / file).read_text()
    assert "bring neither" not in render_table([ar_row() | {"unjudged": 0}, row(accuracy=None) | {"unjudged": 9}])


def test_rounds_are_ordered_by_number(tmp_path):
    inputs = {f"evaluate/round{k}": write_evaluation(tmp_path / str(k), f"round{k}", [trained_row(f"round{k}", 16, 2.0)]) for k in (10, 2)}
    run(ReportConfig(experiment="x"), inputs | {"export/final": tmp_path}, tmp_path, StageContext())
    assert [line["model"] for line in json.loads((tmp_path / "results.json").read_text())["rows"]] == ["round2", "round10"]


def test_page_escapes_what_a_model_wrote(report):
    page = (report[0] / "report.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "Say &lt;b&gt;hi&lt;/b&gt;" in page


def test_page_is_self_contained(report):
    page = (report[0] / "report.html").read_text()
    assert not re.search(r"""<(?:script|link|img|iframe)[^>]*\b(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", page)
    assert not re.search(r"<script[^>]*\bsrc=", page)
    assert page.count(get_plotlyjs()) == 1
    assert page.count("Plotly.newPlot(") >= 3


def test_page_tells_of_differences_and_equality(report, tmp_path):
    page = (report[0] / "report.html").read_text()
    assert "<td>minicode/3</td><td>jacobi</td><td>16</td><td>4</td><td>12</td><td>2e-06</td><td>tie</td>" in page
    inputs = {"evaluate/base": write_evaluation(tmp_path / "b", "base", [ar_row(), row()]), "export/final": tmp_path}
    run(ReportConfig(experiment="x"), inputs, tmp_path, StageContext())
    equal = (tmp_path / "report.html").read_text()
    assert "equal, token for token" in equal and "equal, token for token" not in page
    assert "Nothing was trained" in equal and "Nothing was trained" not in page


def test_markdown_table(report):
    text = (report[0] / "results.md").read_text()
    tables = {}
    for part in text.split("## ")[1:]:
        tables[part.splitlines()[0]] = [line for line in part.splitlines() if line.startswith("|")]
    assert {name: len(lines) for name, lines in tables.items()} == {
        "As in the paper's Tables 1 and 2": 2 + 5,  # of the trained models no AR row
        "All settings": 2 + 6,
        "Speed: spread, other decoders, prefill": 2 + 6,
        "Stops and loops": 2 + 6,
        "Accuracy under parallelism": 2 + 4,
    }
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables.values())
    assert "| round2 | minicode | jacobi | 64 |" in tables["All settings"][6]


def test_a_row_without_a_contract_key_is_refused(tmp_path):
    broken = ar_row()
    del broken["equals_ar"]
    inputs = {"evaluate/base": write_evaluation(tmp_path / "b", "base", [broken]), "export/final": tmp_path}
    with pytest.raises(AssertionError, match="equals_ar"):
        run(ReportConfig(experiment="x"), inputs, tmp_path, StageContext())


@pytest.mark.parametrize("content", [None, "{broken"])
def test_a_missing_or_broken_file_is_named(tmp_path, content):
    (tmp_path / "b").mkdir()
    if content:
        (tmp_path / "b" / "evaluation.json").write_text(content)
    with pytest.raises(UserError, match=r"b/evaluation\.json"):
        run(ReportConfig(experiment="x"), {"evaluate/base": tmp_path / "b", "export/final": tmp_path}, tmp_path, StageContext())


def test_nan_is_refused(tmp_path):
    inputs = {"evaluate/base": write_evaluation(tmp_path / "b", "base", [ar_row(accuracy=float("nan"))]), "export/final": tmp_path}
    with pytest.raises(AssertionError, match="NaN"):
        run(ReportConfig(experiment="x"), inputs, tmp_path, StageContext())


def test_console_table():
    rows = [ar_row(), trained_row("round1", 16, 4.0, accuracy=15 / 16, accuracy_prompts=16, tokens=1_234_567), row(accuracy=None, accuracy_prompts=0)]
    text = render_table([*rows, row(batch_size=16)])  # batches are left to results.md
    table = text.split("\n\n")[0].splitlines()
    assert len(table) == 1 + 3 + 3  # titles, rows, a rule wherever the model changes
    assert all(len(line) <= 140 for line in text.splitlines())
    assert "15/16" in text and "1,234,567" in text
    assert "rests on 16 problems" in text and "6.2 points" in text
    assert "rests on" not in render_table([ar_row()])  # 200 problems need no warning
    starts = {line.index("jacobi") for line in table if "jacobi" in line}
    assert len(starts) == 1


def test_machine_facts():
    machine = hardware()
    assert machine["cpu"] and machine["cores"] >= 1 and machine["memory_gb"] > 0.5 and machine["torch_threads"] >= 1
    assert machine["gpus"] is None or all(machine["gpus"])
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", git_sha())


def test_import_is_light():
    check = "import sys, tasks.report; assert not {'torch', 'pandas', 'plotly', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
