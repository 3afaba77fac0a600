"""The ten claims of the paper, (a) to (j), judged by what was measured: data frames in, verdicts out. Reads and writes no file.

When a claim counts as confirmed was fixed on 30 November 2026: before any run of experiment=ladder, after the ablations and the quickstart had been
seen. "In every run" is meant literally: runs that disagree, or that lie between the two limits, make a claim "not seen". TPF is of prompts decoded
one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pandas as pd

from dashboards.paper_numbers import TABLE4, TABLE5, TABLES12
from dashboards.paper_table import REFERENCES
from dashboards.sweep import last_model
from dashboards.verdicts import Case, Claim, Verdict, judged

BASE_TPF = 1.10  # (a) at most, by plain Jacobi decoding of a base, at its best block size
JF_WINS, JF_LOSES = 1.05, 0.95  # (b) TPF of the last round over CLLM*'s: above, below; between them 5 % of noise
UNEQUAL_TOKENS = 0.05  # (b) more than this apart, a note says that the two were not trained equally long
GAP = 0.05  # (c) by how much that ratio must rise, or fall, from the smallest to the largest block size
ROUND_ADDS, ROUND_COSTS = 1.10, 1.0  # (d) TPF of round 2 over round 1's: half of the paper's 20 % at least; below 1 it costs
MASK_GAIN = 0.02  # (f) by how much NC must be above, or below, NC-IC
SATURATED, UNSATURATED = 0.8, 0.5  # (g) share of the gain of the most blocks over one block that two blocks bring: at least, less than
LEAST_GAIN = 0.01  # (g) that the most blocks must bring over one block, or there is nothing to saturate
MR_ADDS, MR_COSTS = 1.02, 1.0  # (h) TPF of mr over plain Jacobi's: the paper's smallest gain; below 1 it costs
MR_BLOCK = 64  # (h) the paper's block size with MR; the largest common one where it was not measured
LOST_POINTS = -1.0  # (j) accuracy of the last round minus the base's, in points: at least
USUAL_K = 2  # blocks of a plain `mr`
ORDER = ("linear", "random", "reverse")  # (e) from the best to the worst

_K = re.compile(r"mr(?: \(K=(\d+)\))?")
Sweeps = Mapping[str, Mapping[str, Any]]  # the content of every sweep.json, by name


def ten_claims(rows: pd.DataFrame, sweeps: Sweeps) -> list[Claim]:
    """(a) to (j). rows: of `evidence_rows.run_rows`; what no run and no sweep measured has no case."""
    cases = [(group, of_run) for (_, group), of_run in rows.groupby(["run", "group"], sort=False)] if len(rows) else []
    found = {letter: [case for group, of_run in cases for case in judge(group, of_run)] for letter, judge in _JUDGES.items()}
    found["e"] = [case for name, group in _of_table(sweeps, "table4") for case in _schedules(name, group)]
    found["f"] = [case for name, group in _of_table(sweeps, "table5") for case in _masks(name, group)]
    found["i"] += [_equal(name, pd.DataFrame(sweep["rows"])) for name, sweep in sweeps.items()]
    return [Claim(letter, *_TEXTS[letter], cases=found[letter], any_opposite=letter in "ai") for letter in sorted(_TEXTS)]


# ---- runs: every judge yields one case, or none where the run did not measure it


def _tpf(rows: pd.DataFrame, model: str | None, method: str = "jacobi") -> dict[int, float]:
    """By block size, one prompt at a time."""
    found = rows[(rows["model"] == model) & (rows["method"] == method) & (rows["batch_size"] == 1)]
    return dict(zip(found["block_size"], found["tpf"], strict=True))


def _last(rows: pd.DataFrame) -> str | None:
    return last_model([{"model": model} for model in rows["model"].unique()])


def _ratio(one: float, other: float) -> float:
    return round(one / other, 9)  # 1.1 / 1.0 is to reach a limit of 1.1


def _base(group: str, rows: pd.DataFrame) -> Iterator[Case]:
    if tpf := _tpf(rows, "base"):
        best = max(tpf, key=lambda block: tpf[block])
        within = tpf[best] <= BASE_TPF
        yield Case(group, f"block {best}", {"TPF": (tpf[best], ".3f")}, judged(confirmed=within, opposite=not within))


def _against_cllm(group: str, rows: pd.DataFrame) -> Iterator[Case]:
    last = _last(rows)
    jf, cllm = _tpf(rows, last), _tpf(rows, "cllm")
    if common := jf.keys() & cllm.keys():
        block = max(common)
        ratio, (ours, theirs) = _ratio(jf[block], cllm[block]), (int(rows[rows["model"] == m]["train_tokens"].max()) for m in (last, "cllm"))
        figures = {"JF / CLLM*": (ratio, ".3f"), "JF TPF": (jf[block], ".2f"), "CLLM* TPF": (cllm[block], ".2f")}
        figures |= {"JF million tokens": (ours / 1e6, ".2f"), "CLLM* million tokens": (theirs / 1e6, ".2f")}
        unequal = abs(ours - theirs) > UNEQUAL_TOKENS * max(ours, theirs)
        notes = (f"JF and CLLM* trained on numbers of tokens more than {UNEQUAL_TOKENS:.0%} apart: no comparison at equal cost.",) if unequal else ()
        yield Case(group, f"block {block}", figures, judged(confirmed=ratio > JF_WINS, opposite=ratio < JF_LOSES), notes)


def _gap(group: str, rows: pd.DataFrame) -> Iterator[Case]:
    jf, cllm = _tpf(rows, _last(rows)), _tpf(rows, "cllm")
    if len(common := jf.keys() & cllm.keys()) > 1:
        small, large = min(common), max(common)
        first, then = _ratio(jf[small], cllm[small]), _ratio(jf[large], cllm[large])
        rise = round(then - first, 9)
        figures = {"rise": (rise, "+.3f"), f"at {small}": (first, ".3f"), f"at {large}": (then, ".3f")}
        yield Case(group, f"blocks {small} to {large}", figures, judged(confirmed=rise > GAP, opposite=rise < -GAP))


def _second_round(group: str, rows: pd.DataFrame) -> Iterator[Case]:
    first, second = _tpf(rows, "round1"), _tpf(rows, "round2")
    if common := first.keys() & second.keys():
        block = max(common)
        ratio = _ratio(second[block], first[block])
        figures = {"round 2 / round 1": (ratio, ".3f"), "round 1 TPF": (first[block], ".2f"), "round 2 TPF": (second[block], ".2f")}
        yield Case(group, f"block {block}", figures, judged(confirmed=ratio >= ROUND_ADDS, opposite=ratio < ROUND_COSTS))


def _saturation(group: str, rows: pd.DataFrame) -> Iterator[Case]:
    last, by_block = _last(rows), {}
    for method in rows["method"].unique():
        if named := _K.fullmatch(method):
            for block, tpf in _tpf(rows, last, method).items():
                by_block.setdefault(block, {})[int(named[1] or USUAL_K)] = tpf
    complete = {block: tpf for block, tpf in by_block.items() if tpf.keys() >= {1, 2} and max(tpf) > 2}
    if complete:
        block = max(complete)
        tpf = complete[block]
        most = max(tpf)
        gain = round(tpf[most] / tpf[1] - 1, 9)
        share = round((tpf[2] - tpf[1]) / (tpf[most] - tpf[1]), 9) if gain > LEAST_GAIN else None
        figures = {f"gain of K={most}": (gain, "+.1%")} | ({"share of it that K=2 brings": (share, ".0%")} if share is not None else {})
        figures |= {f"TPF K={k}": (tpf[k], ".3f") for k in sorted(tpf)}
        confirmed, opposite = share is not None and share >= SATURATED, share is not None and share < UNSATURATED
        yield Case(group, f"block {block}", figures, judged(confirmed=confirmed, opposite=opposite))


def _recycling(group: str, rows: pd.DataFrame) -> Iterator[Case]:
    last = _last(rows)
    plain, mr = _tpf(rows, last), _tpf(rows, last, "mr")
    if common := plain.keys() & mr.keys():
        block = MR_BLOCK if MR_BLOCK in common else max(common)
        ratio = _ratio(mr[block], plain[block])
        figures = {"mr / jacobi": (ratio, ".3f"), "jacobi TPF": (plain[block], ".2f"), "mr TPF": (mr[block], ".2f")}
        yield Case(group, f"block {block}", figures, judged(confirmed=ratio >= MR_ADDS, opposite=ratio < MR_COSTS))


def _lossless(group: str, rows: pd.DataFrame) -> Iterator[Case]:
    ours = rows[~rows["method"].isin(REFERENCES)]
    if len(ours):
        found = _equal(group, ours)
        below = ours[ours["equals_ar"] < 1]
        kinds = {f"prompts that differ, {kind}": (int(below[kind].sum()), ",.0f") for kind in ("ties", "defects") if len(below)}
        yield Case(group, found.where, found.figures | kinds, found.verdict)


def _equal(group: str, rows: pd.DataFrame) -> Case:
    equal = rows["equals_ar"].dropna().astype(float)
    figures = {"rows": (len(equal), ",.0f"), "of them not equal": (int((equal < 1).sum()), ",.0f")}
    if len(equal):
        figures["smallest share of equal prompts"] = (equal.min(), ".4g")
    verdict = judged(confirmed=bool((equal == 1).all()), opposite=True) if len(equal) else Verdict.not_measured
    return Case(group, "all settings", figures, verdict)


def _accuracy(group: str, rows: pd.DataFrame) -> Iterator[Case]:
    judged_rows = rows.dropna(subset=["accuracy"])
    base, last = (judged_rows[judged_rows["model"] == model] for model in ("base", _last(rows)))
    if len(base) and len(last):
        before, after = float(base["accuracy"].iloc[0]), float(last["accuracy"].iloc[0])
        points = round(100 * (after - before), 6)
        figures = {"points": (points, "+.1f"), "base %": (100 * before, ".1f"), "last round %": (100 * after, ".1f")}
        problems = min(base["accuracy_prompts"].iloc[0], last["accuracy_prompts"].iloc[0])
        yield Case(group, f"{problems:,.0f} problems", figures, judged(confirmed=points >= LOST_POINTS, opposite=points < LOST_POINTS))


_JUDGES: dict[str, Callable[[str, pd.DataFrame], Iterator[Case]]] = {
    "a": _base,
    "b": _against_cllm,
    "c": _gap,
    "d": _second_round,
    "g": _saturation,
    "h": _recycling,
    "i": _lossless,
    "j": _accuracy,
}


# ---- sweeps


def _of_table(sweeps: Sweeps, table: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Per sweep and benchmark one row per finished job: `kind, window, tpf, low, high`, at the largest block size that all of them were decoded at.

    kind: noise schedule (table4) or mask (table5). low, high: of TPF's interval, where there is one. attrs: `block`.
    """
    for name, sweep in sweeps.items():
        jobs = [row for row in sweep["rows"] if row["number"] is not None and not row["error"]] if sweep["paper"] == table else []
        for benchmark in dict.fromkeys(row["benchmark"] for row in jobs):
            of_benchmark = [row for row in jobs if row["benchmark"] == benchmark]
            shared = set.intersection(*(set(row["tpf"]) for row in of_benchmark))
            blocks = [int(setting.partition("@")[2]) for setting in shared if setting.startswith("jacobi@")]
            if blocks:
                frame = pd.DataFrame([_job(row, table, f"jacobi@{max(blocks)}") for row in of_benchmark]).dropna(subset=["kind"])
                frame.attrs["block"] = max(blocks)
                yield f"{name}, {benchmark}", frame


def _job(row: Mapping[str, Any], table: str, setting: str) -> dict[str, Any]:
    window = next((int(value) for key, value in row["settings"].items() if key.endswith("window") and value.isdecimal()), 0)
    low, high = row["tpf_interval"].get(setting) or (None, None)
    kind = row["settings"].get("noise_schedule" if table == "table4" else "distill.mask")
    return {"kind": kind, "window": window, "tpf": row["tpf"][setting], "low": low, "high": high}


def _schedules(name: str, jobs: pd.DataFrame) -> Iterator[Case]:
    best = {kind: jobs.loc[of_kind["tpf"].idxmax()] for kind, of_kind in jobs.groupby("kind")}
    if best.keys() >= set(ORDER):
        tpf = [best[kind]["tpf"] for kind in ORDER]
        right, wrong = tpf[0] > tpf[1] > tpf[2], tpf[0] < tpf[1] < tpf[2]
        figures = {f"{kind} (window {best[kind]['window']})": (best[kind]["tpf"], ".3f") for kind in ORDER}
        notes = [f"Window {window}: {_order(of_window)}." for window, of_window in jobs.groupby("window")]
        ordered = sorted(ORDER, key=lambda kind: -best[kind]["tpf"])
        for one, other in pairwise(ordered):
            if pd.notna(best[one]["low"]) and best[one]["low"] <= best[other]["high"]:
                notes.append(f"The intervals of {one} and {other} at their best windows overlap: these two are not told apart.")
        yield Case(name, f"block {jobs.attrs['block']}", figures, judged(confirmed=right, opposite=wrong), tuple(notes))


def _order(jobs: pd.DataFrame) -> str:
    mean = jobs.groupby("kind")["tpf"].mean().sort_values(ascending=False)
    return " > ".join(f"{kind} {tpf:.3f}" for kind, tpf in mean.items())


def _masks(name: str, jobs: pd.DataFrame) -> Iterator[Case]:
    tpf = jobs.groupby("kind")["tpf"].mean()
    if {"nc", "nc_ic"} <= set(tpf.index):
        gain = round(tpf["nc"] / tpf["nc_ic"] - 1, 9)
        figures = {"NC over NC-IC": (gain, "+.1%"), "NC TPF": (tpf["nc"], ".3f"), "NC-IC TPF": (tpf["nc_ic"], ".3f")}
        yield Case(name, f"block {jobs.attrs['block']}", figures, judged(confirmed=gain > MASK_GAIN, opposite=gain < -MASK_GAIN))


# ---- what the paper says, and when it counts as seen


def _paper(figure: Callable[[Mapping[str, tuple[float, ...]]], float], spec: str = ".2f") -> str:
    """The range of a figure over the paper's four benchmarks."""
    found = [figure(methods) for _, _, methods in TABLES12.values()]
    return f"{min(found):{spec}} to {max(found):{spec}}"


def _best_of_table4(kind: str) -> float:
    return max(1 / iterations for (schedule, _), (_, iterations) in TABLE4.items() if schedule == kind)


_TEXTS = {  # letter -> title, what the paper says, the criterion
    "a": (
        "Plain Jacobi decoding of a base gives a TPF of about 1",
        f"TPF {_paper(lambda m: m['Jacobi'][0])}.",
        f"Confirmed: at most {BASE_TPF:.2f} at the best block size, in every run. Else opposite.",
    ),
    "b": (
        "Jacobi Forcing beats CLLM* at equal training tokens",
        f"{_paper(lambda m: m['Jacobi Forcing'][0] / m['CLLM*'][0])} times CLLM*'s TPF.",
        f"TPF of the last round over CLLM*'s at the largest common block size. Confirmed: above {JF_WINS:.2f} in every run. Opposite: below "
        f"{JF_LOSES:.2f} in every run.",
    ),
    "c": (
        "That gap grows with the decoding block",
        "The advantage is claimed for large decoding blocks, where many noisy blocks follow each other.",
        f"The ratio of (b) at the largest block size minus that at the smallest. Confirmed: above {GAP:.2f} in every run. Opposite: below -{GAP:.2f} "
        "in every run.",
    ),
    "d": (
        "A second round with larger blocks adds about 20 %",
        "About 1.2 times the first round's TPF.",
        f"TPF of round 2 over round 1's at the largest common block size. Confirmed: at least {ROUND_ADDS:.2f} in every run. Opposite: below "
        f"{ROUND_COSTS:.2f} in every run.",
    ),
    "e": (
        "Of the noise schedules linear is better than random, random than reverse",
        f"Table 4: TPF {', '.join(f'{_best_of_table4(kind):.2f} ({kind})' for kind in ORDER)}, each at its best window.",
        "TPF of each schedule at its best window, at the largest decoding block. Confirmed: in this order. Opposite: in exactly the reverse order.",
    ),
    "f": (
        "The mask NC is better than NC-IC",
        f"Table 5: speedup {TABLE5['nc'][0]} against {TABLE5['nc_ic'][0]}.",
        f"TPF at the largest decoding block. Confirmed: NC more than {MASK_GAIN:.0%} above NC-IC. Opposite: more than {MASK_GAIN:.0%} below.",
    ),
    "g": (
        "Two blocks in flight are enough",
        "K = 2 is the best of the paper's search; more blocks add nothing.",
        f"TPF of `mr` with K blocks, last round. Confirmed: K=2 brings at least {SATURATED:.0%} of what the largest K brings over K=1, and that is "
        f"more than {LEAST_GAIN:.0%}, in every run. Opposite: less than {UNSATURATED:.0%} of it in every run. No gain at all is not seen.",
    ),
    "h": (
        "Recycling and a second block (MR) add TPF",
        f"{_paper(lambda m: m['Jacobi Forcing (MR)'][0] / m['Jacobi Forcing'][0])} times the TPF without.",
        f"TPF of `mr` over `jacobi`'s at block {MR_BLOCK} (else at the largest common block), last round. Confirmed: at least {MR_ADDS:.2f} in every "
        f"run. Opposite: below {MR_COSTS:.2f} in every run.",
    ),
    "i": (
        "Decoding is lossless",
        "Greedy answers are those of AR, token for token.",
        "Confirmed: in every row of our decoders all answers equal greedy AR's of the same model. Else opposite.",
    ),
    "j": (
        "Training costs little accuracy",
        f"{_paper(lambda m: m['Jacobi Forcing'][3] - m['AR'][3], '+.1f')} points.",
        f"Accuracy of the last round minus the base's, in points. Confirmed: at least {LOST_POINTS:.1f} in every run. Opposite: below in every run.",
    ),
}
