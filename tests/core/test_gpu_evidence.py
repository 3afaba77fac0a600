"""The prepared GPU script on the CPU, at toy size: it runs to its end, and says what its docstring promises."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest

from jacobi_core.decoding.doctor import Certificate, Finding
from tests.gpu import evidence
from tests.gpu.evidence_training import EOS, PROMPT, TINY, VALUES, subject, texts

pytestmark = pytest.mark.slow  # some twenty seconds of CPU for a script that is run by hand

METHODS = ("ar_eager", "ar_graphs", "jacobi", "running_window", "mr")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[int, dict]:
    """Exit code, and the values by name."""
    file = tmp_path_factory.mktemp("evidence") / "evidence.json"
    code = evidence.main(["--device", "cpu", "--tiny", "--minutes", "10", "--json", str(file)])
    rows = json.loads(file.read_text())
    assert all(list(row) == ["name", "model", "value"] and row["model"] == "qwen2-tiny" for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    return code, {row["name"]: row["value"] for row in rows}


def test_every_part_ran(finished):
    code, found = finished
    assert code == 0 and "failed" not in found
    assert {f"seconds_{name}" for name, _, _ in evidence.PARTS} <= found.keys()
    assert found["device"] == "cpu" and re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["tests_passed"] > 0 and found["tests_skipped"] > 0  # those of the GPU
    assert found["tests_failed"] == found["tests_error"] == 0


def test_the_model_learnt(finished):
    found = finished[1]
    assert found["pretrain_loss"] < 3.5  # 4.6 by chance among 97 values
    assert found["trajectories"] == TINY.trajectories
    assert found["distill_steps"] == TINY.distill_steps and found["packed_tokens_per_s"] > 0
    assert found["distill_loss_end"] < found["distill_loss_start"]


def test_tokens_per_forward_and_per_second(finished):
    found = finished[1]
    assert found["tpf_ar_eager"] == found["tpf_ar_graphs"] == found["speedup_ar_graphs"] == 1
    for method in METHODS:
        assert found[f"tpf_{method}"] >= 1 and found[f"tps_{method}"] > 0
    assert found["same_ar_eager"] == found["equal_float32"] == 1


def test_latency_is_a_curve(finished):
    found = finished[1]
    for context in TINY.contexts:
        curve = [found[f"latency_ms_{context}_{tokens}"] for tokens in TINY.widths]
        assert curve[0] > 0 and curve == sorted(curve)


def test_a_failed_part_is_told_and_the_next_one_runs(monkeypatch, tmp_path, capsys):
    def broken(it, record, until):
        record("half", 1)
        raise ValueError("two\nlines")

    def endless(it, record, until):
        time.sleep(60)

    monkeypatch.setattr(evidence, "GRACE", 0)
    monkeypatch.setattr(evidence, "PARTS", (("one", 0.1, broken), ("two", 0.1, endless), ("three", 0.8, lambda it, record, until: record("last", 2))))
    file = tmp_path / "evidence.json"
    assert evidence.main(["--device", "cpu", "--tiny", "--minutes", "0.01", "--json", str(file)]) == 1
    rows = [(row["name"], row["value"]) for row in json.loads(file.read_text())]
    assert [value for name, value in rows if name == "failed"] == ["one: ValueError: two lines", "two: TimeoutError: not finished after 1 s"]
    assert ("half", 1) in rows and ("last", 2) in rows
    assert "2 of 3 parts failed" in capsys.readouterr().out


def test_the_tests_end_with_their_time(monkeypatch):
    monkeypatch.setattr(evidence, "GRACE", 0)
    recorded = {}
    with pytest.raises(AssertionError, match="pytest ended with"):
        evidence.tests(subject(TINY, evidence.torch.device("cpu"), None), recorded.__setitem__, time.monotonic())
    assert recorded["tests_passed"] == 0 and 1 < recorded["tests_seconds"] < 60


@pytest.mark.parametrize(
    "told",
    [
        "t.py::a[1 b] PASSED  [ 20%]\nt.py::b PASSED\nt.py::c FAILED\nt.py::d SKIPPED (why)\nt.py::e ",
        "[gw0] [ 20%] PASSED t.py::a[1 b] \n[gw1] [  9%] PASSED t.py::b \nt.py::c \n[gw0] [100%] FAILED t.py::c \n[gw1] [ 80%] SKIPPED t.py::d ",
    ],
)
def test_what_was_told_before_the_end_is_counted(told):
    assert evidence.outcomes(told) == {"passed": 2, "failed": 1, "skipped": 1, "error": 0}


def test_a_difference_in_float32_is_a_failure(monkeypatch):
    finding = Finding(prompt=0, method="mr", block_size=8, first_index=3, margin=1e-5, tolerance=1e-3, kind="tie")
    certificate = Certificate("float32", runs={"mr/8": 2}, equal={"mr/8": 1}, findings=[finding])
    monkeypatch.setattr(evidence, "certify", lambda *args, **more: certificate)
    recorded = {}
    with pytest.raises(AssertionError, match="1 answers are not greedy AR's in float32"):
        evidence.equality(subject(TINY, evidence.torch.device("cpu"), None), recorded.__setitem__, 0.0)
    assert recorded == {"equal_float32": 0.5}


def test_the_language_is_determined_by_its_prompts():
    for row in texts(20, length=30, seed=3).tolist():
        steps, values = row[1:4], row[PROMPT - 1 :]
        gaps = [(b - a) % len(VALUES) for a, b in itertools.pairwise(values)]
        assert gaps == [steps[i % 3] - 1 for i in range(len(gaps))]
        assert EOS not in row


@pytest.mark.parametrize("given, said", [([], "no CUDA device"), (["--device", "cpu"], "older than 5.24")])
def test_what_cannot_run_is_said_in_one_line(given, said, monkeypatch, capsys):
    monkeypatch.setattr(evidence.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(evidence.importlib.metadata, "version", lambda name: "5.17.0")
    with pytest.raises(SystemExit):
        evidence.main(given)
    assert said in capsys.readouterr().err.splitlines()[-1]
