"""Every verdict of every claim, from made-up runs and sweeps: at the limits, with seeds that disagree, and where nothing was measured."""

from __future__ import annotations

import pandas as pd
import pytest

from dashboards.claims import ten_claims
from dashboards.claims_page import claims_markdown
from dashboards.evidence_rows import run_rows, size
from dashboards.verdicts import Case, Claim, Verdict, spread
from tests.results import ar_row, row, trained_row

CONFIRMED, NOT_SEEN, OPPOSITE, NOT_MEASURED = Verdict.confirmed, Verdict.not_seen, Verdict.opposite, Verdict.not_measured


def run(*rows: dict, parameters: int | None = 3_626_240, differences=(), **seconds: float) -> dict:
    made = {"seed": 0, "overrides": [], "parameters": parameters, "seconds": seconds, "accepted": {}}
    return {"experiment": "x", "rows": list(rows), "differences": list(differences), "made": made}


def claim(letter: str, *runs: dict, sweeps: dict | None = None) -> Claim:
    rows = run_rows({f"x-{seed}": found for seed, found in enumerate(runs)})
    return next(found for found in ten_claims(rows, sweeps or {}) if found.letter == letter)


def verdict(letter: str, *runs: dict, **kwargs) -> Verdict:
    return claim(letter, *runs, **kwargs).verdict


def trained(model: str, method: str = "jacobi", **tpf: float) -> list[dict]:
    """Rows of a trained model: b16=4.0 is TPF 4 at block 16."""
    return [trained_row(model, int(block[1:]), value, method=method) for block, value in tpf.items()]


def test_nothing_measured():
    assert {found.verdict for found in ten_claims(run_rows({}), {})} == {NOT_MEASURED}
    assert [found.letter for found in ten_claims(run_rows({}), {})] == list("abcdefghij")
    alone = {found.letter: found.verdict for found in ten_claims(run_rows({"x": run(row(), ar_row())}), {})}
    assert alone == dict.fromkeys("bcdefghj", NOT_MEASURED) | dict.fromkeys("ai", CONFIRMED)


@pytest.mark.parametrize(
    ("best", "expected"), [([1.02], CONFIRMED), ([1.10], CONFIRMED), ([1.11], OPPOSITE), ([1.02, 1.3], OPPOSITE), ([1.0, 1.1], CONFIRMED)]
)
def test_a_base(best, expected):
    runs = [run(row(block_size=16, tpf=1.0), row(block_size=64, tpf=tpf), row(method="mr", tpf=9.0), row(batch_size=4, tpf=9.0)) for tpf in best]
    assert verdict("a", *runs) == expected


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.06], CONFIRMED),
        ([1.05], NOT_SEEN),
        ([1.0], NOT_SEEN),
        ([0.95], NOT_SEEN),
        ([0.94], OPPOSITE),
        ([1.2, 1.06, 1.5], CONFIRMED),
        ([1.2, 1.06, 1.04], NOT_SEEN),
        ([1.2, 0.9], NOT_SEEN),
        ([0.9, 0.8], OPPOSITE),
    ],
)
def test_b_against_cllm(ratios, expected):
    """At block 64, the largest that both have; the last round, not the first."""
    runs = [run(*trained("round1", b64=90.0), *trained("round2", b16=1.0, b64=4 * r, b128=99.0), *trained("cllm", b16=9.0, b64=4.0)) for r in ratios]
    assert verdict("b", *runs) == expected


def test_b_says_what_both_were_trained_on():
    rows = [trained_row("round1", 16, 2.0), trained_row("cllm", 16, 1.0) | {"train_tokens": 1_500_000}]
    case = claim("b", run(*rows)).cases[0]
    assert case.figures["JF million tokens"][0] == case.figures["CLLM* million tokens"][0] == 1.5 and not case.notes
    rows[1]["train_tokens"] = 1_000_000
    assert "no comparison at equal cost" in claim("b", run(*rows)).cases[0].notes[0]
    assert verdict("b", run(*trained("round1", b16=2.0), *trained("cllm", b32=2.0))) == NOT_MEASURED


@pytest.mark.parametrize(
    ("at_large", "expected"),
    [([1.06], CONFIRMED), ([1.05], NOT_SEEN), ([0.95], NOT_SEEN), ([0.94], OPPOSITE), ([1.2, 0.8], NOT_SEEN), ([1.2, 1.1], CONFIRMED)],
)
def test_c_gap(at_large, expected):
    runs = [run(*trained("round1", b16=2.0, b32=99.0, b64=2 * r), *trained("cllm", b16=2.0, b32=1.0, b64=2.0)) for r in at_large]
    assert verdict("c", *runs) == expected
    assert verdict("c", run(*trained("round1", b16=2.0), *trained("cllm", b16=2.0))) == NOT_MEASURED  # one block size is no trend


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([1.1], CONFIRMED), ([1.09], NOT_SEEN), ([1.0], NOT_SEEN), ([0.99], OPPOSITE), ([1.2, 1.0], NOT_SEEN), ([0.9, 0.8], OPPOSITE)],
)
def test_d_second_round(ratios, expected):
    runs = [run(*trained("round1", b16=9.0, b64=3.0), *trained("round2", b16=1.0, b64=3 * r)) for r in ratios]
    assert verdict("d", *runs) == expected


@pytest.mark.parametrize(
    ("tpf", "expected"),
    [
        ({1: 4.0, 2: 4.8, 4: 5.0}, CONFIRMED),  # exactly 80 % of the gain
        ({1: 4.0, 2: 5.2, 4: 5.0}, CONFIRMED),
        ({1: 4.0, 2: 4.6, 3: 4.9, 4: 5.0}, NOT_SEEN),
        ({1: 4.0, 2: 4.5, 4: 5.0}, NOT_SEEN),
        ({1: 4.0, 2: 4.4, 4: 5.0}, OPPOSITE),
        ({1: 4.0, 2: 4.04, 4: 4.04}, NOT_SEEN),  # 1 % is no gain
        ({1: 4.0, 2: 3.0, 4: 3.9}, NOT_SEEN),
        ({1: 4.0, 2: 5.0}, NOT_MEASURED),
        ({2: 4.0, 4: 5.0}, NOT_MEASURED),
    ],
)
def test_g_saturation(tpf, expected):
    rows = [row for k, value in tpf.items() for row in trained("round1", "mr" if k == 2 else f"mr (K={k})", b64=value)]
    other = trained("round1", "mr (K=9, ngram)", b64=99.0) + trained("base", "mr", b128=1.0)
    assert verdict("g", run(*rows, *other)) == expected


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.02], CONFIRMED),
        ([1.01], NOT_SEEN),
        ([1.0], NOT_SEEN),
        ([0.99], OPPOSITE),
        ([1.05, 1.01], NOT_SEEN),
        ([1.05, 0.9], NOT_SEEN),
        ([0.9, 0.9], OPPOSITE),
    ],
)
def test_h_recycling(ratios, expected):
    """At the paper's 64 although 128 was measured; without 64 at the largest."""
    runs = [run(*trained("round1", b64=4.0, b128=1.0), *trained("round1", "mr", b64=4 * r, b128=9.0)) for r in ratios]
    assert verdict("h", *runs) == expected
    small = [run(*trained("round1", b16=1.0, b32=4.0), *trained("round1", "mr", b16=9.0, b32=4 * r)) for r in ratios]
    assert verdict("h", *small) == expected


def test_i_lossless():
    theirs = row(method="transformers", equals_ar=0.5)
    assert verdict("i", run(row(), theirs)) == CONFIRMED
    unlike = [
        {**{key: row()[key] for key in ("model", "benchmark", "method", "block_size", "batch_size")}, "kind": kind}
        for kind in ("tie", "tie", "defect")
    ]
    found = claim("i", run(row()), run(row(equals_ar=0.9), ar_row(), theirs, differences=unlike))
    assert found.verdict == OPPOSITE
    assert {name: number for name, (number, _) in found.cases[1].figures.items()} == {
        "rows": 2,
        "of them not equal": 1,
        "smallest share of equal prompts": 0.9,
        "prompts that differ, ties": 2,
        "prompts that differ, defects": 1,
    }


@pytest.mark.parametrize(
    ("after", "expected"), [([0.96], CONFIRMED), ([0.99], CONFIRMED), ([0.959], OPPOSITE), ([0.96, 0.9], NOT_SEEN), ([0.9, 0.8], OPPOSITE)]
)
def test_j_accuracy(after, expected):
    """0.96 - 0.97 is a little below -0.01 in floating point, and one point all the same."""
    runs = [run(ar_row(accuracy=0.97), trained_row("round1", 16, 2.0, accuracy=0.5), trained_row("round2", 16, 2.0, accuracy=a)) for a in after]
    found = claim("j", *runs)
    assert found.verdict == expected
    assert {case.where for case in found.cases} == {"200 problems"}
    unjudged = run(ar_row(accuracy=None, accuracy_prompts=None), trained_row("round1", 16, 2.0, accuracy=None))
    assert verdict("j", unjudged) == NOT_MEASURED


# ---- sweeps


def job(number: int | None, settings: dict, tpf: float, *, interval: float | None = 0.1, equals_ar: float = 1.0, error: str | None = None) -> dict:
    intervals = {} if interval is None else {"jacobi@64": [tpf - interval, tpf + interval]}
    common = {"benchmark": "minicode", "equals_ar": equals_ar, "error": error}
    return {
        "number": number,
        "settings": settings,
        "tpf": {"jacobi@16": 5 - tpf, "jacobi@64": tpf, "mr@128": 1.0},
        "tpf_interval": intervals,
    } | common


def schedules(interval: float | None = 0.1, **tpf: dict[int, float]) -> dict:
    jobs = [({"noise_schedule": kind, "rounds.0.window": str(window)}, value) for kind, found in tpf.items() for window, value in found.items()]
    return {"paper": "table4", "rows": [job(None, {}, 1.0), *(job(i, *found, interval=interval) for i, found in enumerate(jobs))]}


@pytest.mark.parametrize(
    ("tpf", "expected"),
    [
        (dict(linear={4: 1.0, 8: 3.0}, random={4: 2.0, 8: 1.0}, reverse={8: 1.5}), CONFIRMED),
        (dict(linear={8: 1.0}, random={8: 2.0}, reverse={8: 3.0}), OPPOSITE),
        (dict(linear={8: 2.0}, random={8: 3.0}, reverse={8: 1.0}), NOT_SEEN),
        (dict(linear={8: 2.0}, random={8: 2.0}, reverse={8: 1.0}), NOT_SEEN),
        (dict(linear={8: 2.0}, random={8: 1.0}), NOT_MEASURED),
    ],
)
def test_e_schedules(tpf, expected):
    assert verdict("e", sweeps={"ablate": schedules(**tpf)}) == expected
    assert verdict("e", sweeps={"ablate": schedules(None, **tpf)}) == expected  # without intervals
    assert verdict("f", sweeps={"ablate": schedules(**tpf)}) == NOT_MEASURED


def test_e_tells_the_order_of_every_window_and_what_overlaps():
    tpf = dict(linear={4: 1.0, 8: 3.0}, random={4: 2.9, 8: 1.2}, reverse={4: 1.5})
    notes = claim("e", sweeps={"ablate": schedules(**tpf)}).cases[0].notes
    assert notes[:2] == ("Window 4: random 2.900 > reverse 1.500 > linear 1.000.", "Window 8: linear 3.000 > random 1.200.")
    assert notes[2].startswith("The intervals of linear and random at their best windows overlap") and len(notes) == 3


def test_e_of_two_sweeps_that_disagree():
    first, second = schedules(linear={8: 3.0}, random={8: 2.0}, reverse={8: 1.0}), schedules(linear={8: 1.0}, random={8: 2.0}, reverse={8: 3.0})
    assert verdict("e", sweeps={"one": first, "two": first}) == CONFIRMED
    assert verdict("e", sweeps={"one": first, "two": second}) == NOT_SEEN


@pytest.mark.parametrize(("nc", "expected"), [(2.05, CONFIRMED), (2.04, NOT_SEEN), (1.96, NOT_SEEN), (1.95, OPPOSITE)])
def test_f_masks(nc, expected):
    failed = job(2, {"distill.mask": "nc"}, 0.0, error="no results") | {"tpf": {}, "benchmark": None, "equals_ar": None}
    sweep = {"paper": "table5", "rows": [job(0, {"distill.mask": "nc"}, nc), job(1, {"distill.mask": "nc_ic"}, 2.0), failed]}
    assert verdict("f", sweeps={"ablate": sweep}) == expected
    assert verdict("f", sweeps={"ablate": sweep | {"rows": sweep["rows"][:1]}}) == NOT_MEASURED
    assert verdict("i", sweeps={"ablate": sweep}) == CONFIRMED
    assert verdict("i", sweeps={"ablate": sweep | {"rows": [job(0, {}, 1.0, equals_ar=0.9)]}}) == OPPOSITE


# ---- groups and pages


def test_runs_are_averaged_over_seeds_only():
    small, large = (run(row(tpf=tpf), parameters=parameters) for tpf, parameters in ((1.0, 3_626_240), (1.04, 12_345_678)))
    found = claim("a", small, run(row(tpf=1.02), parameters=3_600_000), large)
    assert {group: len(cases) for group, cases in found.groups().items()} == {"x (3.6M), minicode": 2, "x (12M), minicode": 1}
    text = claims_markdown([found], measured="Made up.")
    assert "| x (3.6M), minicode | 2 | block 16 | TPF 1.010 [1.000, 1.020] | confirmed |" in text
    assert "TPF 1.010 [1.000, 1.020]. x (12M), minicode: TPF 1.040 | **confirmed** |" in text


def test_every_claim_is_on_the_page_whatever_was_measured():
    for claims in (
        ten_claims(run_rows({}), {}),
        ten_claims(run_rows({"x": run(row(), *trained("round1", b16=2.0))}), {"s": schedules(linear={8: 1.0})}),
    ):
        text = claims_markdown(claims, measured="Made up.")
        assert [line[4] for line in text.splitlines() if line.startswith("## (")] == list("abcdefghij")


@pytest.mark.parametrize(
    ("parameters", "expected"), [(3_626_240, "3.6M"), (11_990_000, "12M"), (134_515_008, "130M"), (7_615_616_512, "7.6B"), (950, "950")]
)
def test_sizes(parameters, expected):
    assert size(parameters) == expected


def test_minutes_are_of_all_rounds_so_far():
    rows = run_rows({"x": run(row(), *trained("round1", b16=2.0), *trained("round2", b16=2.0), *trained("cllm", b16=2.0), round1=60, round2=90)})
    minutes = dict(zip(rows["model"], rows["minutes"], strict=True))
    assert (minutes["round1"], minutes["round2"]) == (1.0, 2.5) and pd.isna(minutes["base"]) and pd.isna(minutes["cllm"])


def test_spread():
    assert (spread([], ".1f"), spread([2.0], ".1f"), spread([1.0, 3.0], ".1f")) == ("-", "2.0", "2.0 [1.0, 3.0]")


def test_a_case_that_measured_nothing_does_not_count():
    cases = [Case("x", "", {}, verdict) for verdict in (CONFIRMED, NOT_MEASURED)]
    assert Claim("b", "", "", "", cases).verdict == CONFIRMED
