"""Stages `*/answers`, `*/speed` and `*/evaluate`: what a model answers, how fast decoders are on this machine, and what both are worth.

`decode_answers` writes `answers-*.parquet` (greedy, batched: what accuracy rests on), `time_decoders` writes `speed-*.parquet` (every setting in
turn, in one process), `score` judges and tabulates them from those files, as often as one likes. Parallel decoding returns the tokens of greedy
AR (that is what `equals_ar` verifies), so all rows of a model carry the same accuracy.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import artifacts
from tasks.artifacts import Prompt
from tasks.cluster import stop_local_ray
from tasks.completion_files import Completion, read_completions, timed_on
from tasks.evaluate import tables
from tasks.evaluate.answers import AnswerJob, answer_here, answer_on_ray, load
from tasks.evaluate.config import AnswersConfig, EvaluateConfig, SpeedConfig
from tasks.evaluate.room import check_room
from tasks.evaluate.verdicts import Verdict, judge, judged_by, problem_of
from tasks.export_model import provenance
from tasks.measure_latency import machine_identity
from tasks.problem_sets.published import VERSIONS
from tasks.problem_sets.sample_files import STYLES, write_samples
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.stage import StageContext, UserError

log = logging.getLogger(__name__)
SAMPLES = 8  # texts kept for people to read
NAMED = 20  # prompts that cannot be judged, listed by name


def decode_answers(config: AnswersConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model. Writes answers-*.parquet (see docs/schemas.md), and goes on from the parts that are there."""
    prompts = _prompts(config.split, config.accuracy_prompts, inputs["prompts"])
    if not config.sandbox.allow_code_execution and any(judged_by(p) == "tests" for p in prompts):  # rather than after hours of decoding
        raise UserError(
            "evaluate.sandbox.allow_code_execution is false, and these prompts are scored by running generated code; "
            "set it to true to run it in the sandbox"
        )
    check_room("evaluate.max_new_tokens", config.max_new_tokens, inputs["model"], prompts, trust_remote_code=context.trust_remote_code)
    job = AnswerJob(config, inputs["prompts"], inputs["model"], output, context.trust_remote_code, len(prompts))
    todo = job.missing()
    if todo and config.distributed:
        answer_on_ray(job, todo, context)
    elif todo:
        answer_here(job, todo)
    return {"answers": len(prompts)}


def time_decoders(config: SpeedConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model. Writes speed-*.parquet, and goes on from the parts that are there, if they are of this machine."""
    prompts = _prompts(config.split, config.speed_prompts, inputs["prompts"])
    check_room("evaluate.max_new_tokens", config.max_new_tokens, inputs["model"], prompts, trust_remote_code=context.trust_remote_code)
    import torch

    from jacobi_core.hub import default_device
    from tasks.evaluate.speed import decode_parts, missing

    machine = {**machine_identity(), "device": str(default_device()), "torch_threads": torch.get_num_threads()}  # what is, not what was asked for
    todo = missing(config, len(prompts), output, machine)
    if todo:
        stop_local_ray(context.cluster)  # idle as it is, it would be timed too
        loaded = load(inputs["model"], config.dtype, trust_remote_code=context.trust_remote_code)
        decode_parts(config, loaded, prompts, todo, output, machine)
    return {"timed": len(prompts)}


def score(config: EvaluateConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model (its provenance), answers, speed. Writes evaluation.json and answers.json, and of code the samples for other people's
    scorers. Loads no model."""
    origin, machine = provenance(inputs["model"]), timed_on(inputs["speed"])
    answers, timed = (list(read_completions(inputs[kind], kind)) for kind in ("answers", "speed"))
    prompts = {p.id: p for p in _prompts(config.split, max(config.accuracy_prompts, config.speed_prompts), inputs["prompts"])}
    benchmark = next(iter(prompts.values())).meta["problem_set"]
    version = VERSIONS.get(benchmark)
    verdicts = _verdicts(prompts, [*answers, *timed], config.sandbox)
    accuracy, judged = _passed(verdicts, answers)
    unjudged = [_name(prompts[c.id]) for c in answers if (c.id, c.text) not in verdicts]
    if judged and unjudged:
        log.warning("evaluate: %d of %d prompts bring no tests and no answer, and do not count: %s", len(unjudged), len(answers), _few(unjudged))
    runs = tables.runs_of(timed)
    ours = [r for r in runs if r.is_ours and r.setting[2] == 1]
    named = {(r.setting[0], r.setting[2]): r for r in runs if r.setting[0] == "ar" or not r.is_ours}
    rows: list[dict[str, Any]] = []
    for run in runs:
        against = {method: r for (method, size), r in named.items() if size == run.setting[2]}
        rows.append(
            {
                "model": origin["name"],
                "benchmark": benchmark,
                "benchmark_version": version,
                **tables.row(run, against),
                "dtype": config.dtype,
                "accuracy": accuracy,
                "accuracy_prompts": judged,
                "unjudged": len(unjudged),
                "timed_accuracy": _passed(verdicts, run.completions)[0],
                "train_tokens": origin["train_tokens"],
            }
        )
    listed = [
        {"id": c.id, "text": c.text, "tokens": len(c.tokens), "stop_reason": c.stop_reason, **verdicts.get((c.id, c.text), {})} for c in answers
    ]
    artifacts.write_json(output / "answers.json", listed)
    _write_samples(output, [(prompts[c.id], c.text) for c in answers if judged_by(prompts[c.id]) == "tests"])
    artifacts.write_json(
        output / "evaluation.json",
        {
            "model": origin["name"],
            "benchmark": benchmark,
            "benchmark_version": version,
            "model_path": str(inputs["model"]),
            "machine": machine,
            "rows": rows,
            "answers": {
                "prompts": len(answers),
                "stop_reasons": dict(Counter(c.stop_reason for c in answers)),
                "degenerate": sum(c.degenerate for c in answers),
                "unjudged": unjudged[:NAMED],
            },
            "differences": [{"model": origin["name"], **d} for r in runs for d in tables.differences(r, lambda identity: _name(prompts[identity]))],
            "samples": _samples(prompts, ours[0].completions, ours[-1].completions, verdicts),
            "accepted_lengths": {_label(r): tables.accepted_lengths(r) for r in runs},
        },
    )
    return _metrics(rows, accuracy)


def _write_samples(output: Path, answered: Sequence[tuple[Prompt, str]]) -> None:
    """samples-STYLE.jsonl, where there is code."""
    problems, texts = [problem_of(prompt) for prompt, _ in answered], [text for _, text in answered]
    for style in STYLES if answered else ():
        write_samples(output / f"samples-{style}.jsonl", problems, texts, style=style)


def _prompts(split: str, count: int, folder: Path) -> list[Prompt]:
    rows = artifacts.PromptRows(folder, split)
    if not len(rows):
        raise UserError(f"evaluate.split={split}: the prompts hold no such prompt")
    return rows.read(range(min(len(rows), count)))


def _name(prompt: Prompt) -> str:
    return prompt.meta.get("problem_id", str(prompt.id))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _verdicts(prompts: Mapping[int, Prompt], completions: Sequence[Completion], sandbox: SandboxConfig) -> dict[tuple[int, str], Verdict]:
    """By prompt and text, each judged once however many settings said it; without those of prompts that do not tell right from wrong."""
    said = list(dict.fromkeys((c.id, c.text) for c in completions if judged_by(prompts[c.id])))
    found = judge([prompts[identity] for identity, _ in said], [text for _, text in said], sandbox)
    return dict(zip(said, found, strict=True))


def _passed(verdicts: Mapping[tuple[int, str], Verdict], completions: Sequence[Completion]) -> tuple[float | None, int]:
    """Share of the judged that passed, and how many were judged."""
    found = [verdicts[c.id, c.text]["passed"] for c in completions if (c.id, c.text) in verdicts]
    return (sum(found) / len(found) if found else None), len(found)


def _label(run: tables.Run) -> str:
    method, block_size, batch_size = run.setting
    return f"{method}@{block_size}" + (f"x{batch_size}" if batch_size > 1 else "")


def _samples(
    prompts: Mapping[int, Prompt], ar: Sequence[Completion], parallel: Sequence[Completion], verdicts: Mapping[tuple[int, str], Verdict]
) -> list[dict[str, Any]]:
    return [
        {
            "problem_id": _name(prompts[a.id]),
            "prompt": prompts[a.id].messages[-1]["content"],
            "ar": a.text,
            "jacobi": b.text,
            "judged_by": judged_by(prompts[a.id]),
            "passed": verdicts[a.id, a.text]["passed"] if judged_by(prompts[a.id]) else None,
        }
        for a, b in list(zip(ar, parallel, strict=True))[:SAMPLES]
    ]


def _metrics(rows: Sequence[Mapping[str, Any]], accuracy: float | None) -> dict[str, float]:
    ours = [r for r in rows if r["batch_size"] == 1 and r["method"] not in tables.REFERENCES]
    best = max(ours[1:], key=lambda r: r["tps"], default=ours[0])
    found = {
        "ar_tps": ours[0]["tps"],
        "best_tpf": best["tpf"],
        "best_speedup": best["speedup"],
        "equals_ar": min(r["equals_ar"] for r in ours),
        "degenerate_share": ours[0]["degenerate"] / ours[0]["prompts"],
        "capped_share": ours[0]["stop_reasons"].get("length", 0) / ours[0]["prompts"],
    }
    found |= {f"best_{key}": best[key] for key in ("speedup_transformers", "speedup_prompt_lookup") if best[key] is not None}
    return {"accuracy": accuracy, **found} if accuracy is not None else found
