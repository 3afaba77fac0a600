"""Which figures a run's report shows, in which section, and what each of them says about its data; a sentence where there is nothing to draw.

Takes what `tasks.report` read (`results.json` and `Evidence`); reads no file, makes no HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards import figures
from dashboards.paper_table import AUP_LEGEND, REFERENCES

Record = Mapping[str, Any]

_NOT_RECORDED = "The stages of this run were made before excerpts of them were kept."


@dataclass(frozen=True)
class Evidence:
    """What the page shows beside `results.json`."""

    curves: Sequence[Record] = ()  # logged steps, `{model, step, loss, consistency, ar, tokens}`
    probes: Sequence[Record] = ()  # `{model, step, tpf, equal_to_teacher, distinct_2, eos_rate}`
    accepted: Sequence[Record] = ()  # `{model, benchmark, setting, forwards: {committed tokens: number of forwards}}` of our parallel decoders
    samples: Sequence[Record] = ()  # `{model, benchmark, problem_id, prompt, ar, jacobi, judged_by, passed}`
    excerpts: Record = field(default_factory=dict)  # the content of excerpts.json
    visible: np.ndarray | None = None  # bool [n, n] of the last round's packed excerpt from token `first` on
    first: int = 0


@dataclass(frozen=True)
class Shown:
    """A figure of the page, or why there is none."""

    name: str  # of its file
    title: str
    note: str  # its data; without a figure: what is missing, and why
    figure: go.Figure | None = None


def report_figures(results: Record, evidence: Evidence) -> dict[str, list[Shown]]:
    """Section -> its figures."""
    return {
        "Speed and accuracy": list(_speed(results, evidence)),
        "Training": list(_training(evidence)),
        "What the rounds trained on": [*_trajectories(evidence), *_packed(evidence)],
        "This machine": list(_machine(results.get("latency"))),
    }


def _speed(results: Record, evidence: Evidence) -> Iterator[Shown]:
    frame = pd.DataFrame([row for row in results["rows"] if row["batch_size"] == 1 and row["method"] not in REFERENCES])
    areas = {curve["benchmark"] for curve in results["parallelism"]}
    for benchmark, group in frame.groupby("benchmark", sort=False):
        counts = f"{group['prompts'].max():,} prompts of {benchmark}, one at a time"
        note = "Committed tokens over forward passes, prefill counted"
        about = f"{note}: totals over {counts}. Base is before training, each round after it. It does not depend on the machine."
        yield Shown(f"tpf_{benchmark}", f"Tokens per forward before and after each round, {benchmark}", about, figures.tpf_by_block_size(group))
        if group["accuracy"].notna().any():
            about = (
                "Each point is one decoding setting (block size of Jacobi decoding, another method, or AR) of one model; dotted: those that no "
                f"other beats in both. Speed over {counts}; accuracy over {group['accuracy_prompts'].max():,} problems."
            )
            yield Shown(f"speed_accuracy_{benchmark}", f"Speed and accuracy, {benchmark}", about, figures.speed_accuracy(group))
        else:
            yield Shown(f"speed_accuracy_{benchmark}", f"Speed and accuracy, {benchmark}", "Nothing tells right answers from wrong ones here.")
        yield _accepted(str(benchmark), counts, evidence.accepted)
        if benchmark in areas:
            curves = pd.DataFrame([curve for curve in results["parallelism"] if curve["benchmark"] == benchmark])
            drawn = figures.accuracy_under_parallelism(curves)
            yield Shown(f"parallelism_{benchmark}", f"Accuracy under parallelism, {benchmark}", AUP_LEGEND, drawn)
    yield _along(evidence.excerpts)


def _accepted(benchmark: str, counts: str, accepted: Sequence[Record]) -> Shown:
    """At the setting, of those that all models were decoded under, whose forwards commit most in the last model."""
    name, title = f"accepted_{benchmark}", f"Accepted draft tokens by position, {benchmark}"
    forwards: dict[str, dict[str, Record]] = {}
    for found in accepted:
        if found["benchmark"] == benchmark:
            forwards.setdefault(found["model"], {})[found["setting"]] = found["forwards"]
    shared = [setting for setting in next(iter(forwards.values()), {}) if all(setting in of for of in forwards.values())]
    if not shared:
        return Shown(name, title, "No forwards of drafts are recorded that all models were decoded with.")
    last = list(forwards.values())[-1]
    setting = max(shared, key=lambda setting: _mean(last[setting]))
    shares = [
        {"model": model, "position": k, "share": share}
        for model, of in forwards.items()
        for k, share in enumerate(figures.acceptance_shares({int(committed): n for committed, n in of[setting].items()}), start=1)
    ]
    note = f"Share of all forwards over {counts}, at {setting} (method@block size), that accept the k-th draft token: base is before training."
    return Shown(name, title, note, figures.accepted_by_position(pd.DataFrame(shares)))


def _mean(forwards: Record) -> float:
    return sum(int(committed) * n for committed, n in forwards.items()) / sum(forwards.values())


def _along(excerpts: Record) -> Shown:
    name, title = "accepted_along", "Tokens committed by every forward of one answer"
    drafted = [d for d in excerpts.get("decoded", ()) if d["method"] not in ("ar", *REFERENCES) and d["accepted_lengths"]]
    if not drafted:
        return Shown(name, title, "How a single prompt was decoded is not recorded for this run.")
    widest = max(d["block_size"] for d in drafted)
    method = next(d["method"] for d in drafted if d["block_size"] == widest)
    frame = pd.DataFrame(
        [
            {"name": d["model"], "committed": committed, "source": "draft" if committed > 1 else "own"}
            for d in drafted
            if (d["method"], d["block_size"]) == (method, widest)
            for committed in d["accepted_lengths"]
        ]
    )
    note = (
        f"The first timed prompt (id {drafted[0]['prompt_id']}) at {method}@{widest}, by every model; greedy AR is level at 1. Every step is one "
        "forward: as wide and as high as the tokens it commits."
    )
    return Shown(name, title, note, figures.accepted_along(frame))


def _training(evidence: Evidence) -> Iterator[Shown]:
    if not evidence.curves:
        yield Shown("losses", "Losses", "Nothing was trained, or no step was logged.")
        return
    models = ", ".join(dict.fromkeys(point["model"] for point in evidence.curves))
    note = f"Loss terms of every logged optimizer step of {models}, each averaged over the tokens it counts in the global batch. From training.json."
    yield Shown("losses", "Losses", note, figures.training_curves(pd.DataFrame(evidence.curves)))
    if not evidence.probes:
        yield Shown("probes", "Probes", "No distillation of this run was probed while it trained (distill.probe.every).")
        return
    models = ", ".join(dict.fromkeys(point["model"] for point in evidence.probes))
    note = (
        f"Greedy Jacobi decoding of the probe prompts, before the distillation of {models} (step 0) and while it goes on; teacher: the weights it "
        "started from. From training.json."
    )
    yield Shown("probes", "Probes", note, figures.probe_curves(pd.DataFrame(evidence.probes)))
    yield _bought(figures.probes_by_tokens(pd.DataFrame(evidence.probes), pd.DataFrame(evidence.curves)))


def _bought(points: pd.DataFrame) -> Shown:
    name, title = "tpf_by_tokens", "Tokens per forward against training tokens"
    if points.empty:
        return Shown(name, title, "No model was probed after its first step.")
    fits = figures.fits_in_words(points)
    note = f"The same probes against the packed tokens that each distillation had trained on by then, and least-squares lines. {fits}"
    return Shown(name, title, note, figures.tpf_by_tokens(points))


def _trajectories(evidence: Evidence) -> Iterator[Shown]:
    texts = evidence.excerpts.get("texts")
    for found in evidence.excerpts.get("trajectories", ()):
        round_ = found["round"]
        name, title = f"trajectory_{round_}", f"A block's trajectory, collected for {round_}"
        if "missing" in found:
            yield Shown(name, title, found["missing"])
            continue
        tokens = pd.DataFrame(
            [
                {"iteration": i, "position": p, "id": token, "text": _text(token, texts)}
                for i, state in enumerate(found["states"])
                for p, token in enumerate(state)
            ]
        )
        kept, forwards = len(found["states"][-1]), _counted(found["forwards"], "forward")
        width = f"its first {kept} of {found['block_size']} positions" if kept < found["block_size"] else f"{kept} tokens"
        note = (
            f"Block {found['block'] + 1} of the answer to prompt {found['prompt_id']}, {width}, as {_model_before(round_)} decoded it in {forwards}: "
            f"the median of {found['blocks']} blocks of {found['answers']} answers and, of those, the block with the most tokens right before they "
            "are accepted. Top: the first guess; bottom: the fixed point, greedy AR's text."
        )
        yield Shown(name, title, note, figures.trajectory(tokens))
    if not evidence.excerpts.get("trajectories"):
        yield Shown("trajectory", "A block's trajectory", _NOT_RECORDED)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)


def _text(token: int, texts: Mapping[str, str] | None) -> str:
    return str(token) if texts is None else texts[str(token)]


def _model_before(round_: str) -> str:
    number = int(round_.removeprefix("round"))
    return "the base" if number == 1 else f"round{number - 1}'s model"


def packed_frame(found: Record, texts: Mapping[str, str] | None) -> pd.DataFrame:
    """The tokens of a packed excerpt, as `figures.packed_sequence` takes them."""
    columns = {"position": "position_ids", "id": "input_ids", "label": "labels"} | {n: n for n in ("sample", "kind", "block", "window", "teacher")}
    frame = pd.DataFrame({name: found[column] for name, column in columns.items()})
    return frame.assign(text=[_text(token, texts) for token in frame["id"]])


def _packed(evidence: Evidence) -> Iterator[Shown]:
    packed = evidence.excerpts.get("packed", ())
    if not packed:
        yield Shown("packed", "A packed row", _NOT_RECORDED)
        return
    found = packed[-1]
    title = f"A packed row, {found['round']}"
    if "missing" in found:
        yield Shown("packed", title, found["missing"])
        return
    tokens, windows = packed_frame(found, evidence.excerpts.get("texts")), _counted(found["window_blocks"], "block")
    note = (
        f"The first of {found['rows']:,} rows (at most {found['max_length']:,} tokens; windows of {windows}), as it is fed: the prompt, then every "
        "block noisy and clean. A noisy block shares its positions with the clean one behind it. The mouse shows texts and losses."
    )
    yield Shown("packed", title, note, figures.packed_sequence(tokens))
    if evidence.visible is not None:
        part = tokens.iloc[evidence.first : evidence.first + len(evidence.visible)]
        before = f" (from its token {evidence.first + 1} on)" if evidence.first else ""
        note = (
            f"{len(part)} tokens of that row{before}. Dark: the token of this line may attend to the one of this column. P: prompt; N and C: "
            "noisy and clean blocks by number; grey lines where one ends."
        )
        yield Shown("mask", f"Its attention mask, {found['round']}", note, figures.attention_mask(part, evidence.visible))


def _machine(measured: Record | None) -> Iterator[Shown]:
    if not measured:
        yield Shown("latency", "Latency of a forward", "Not measured by this run; tune=true measures it, and searches the fastest decoding setting.")
        return
    note = (
        f"A forward over m tokens, {measured['dtype']}, the quickest of five. Free: as many as take at most {measured['free_ratio']:g} times as "
        "long as one. Knee: where the line through the two widest forwards meets the latency of one token."
    )
    yield Shown("latency", "Latency of a forward", note, figures.latency(measured["curves"]))
