"""Stage `*/evaluate`: accuracy by running tests or comparing answers, and speed of greedy AR, parallel decoding and other people's decoders.

Answers are generated once, into `answers-*.parquet` (greedy, batched: what accuracy rests on) and `speed-*.parquet` (timed, every setting in
turn, in one process); they are scored and tabulated from those files, as often as one likes. Parallel decoding returns the tokens of greedy AR
(that is what `equals_ar` verifies), so all rows of a model carry the same accuracy.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import artifacts
from tasks.artifacts import Prompt
from tasks.completion_files import Completion, read_completions
from tasks.evaluate import tables
from tasks.evaluate.answers import AnswerJob, answer_here, answer_on_ray
from tasks.evaluate.config import CompletionsConfig, EvaluateConfig
from tasks.evaluate.room import check_room
from tasks.evaluate.verdicts import judge, runs_code
from tasks.export_model import provenance
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.stage import StageContext, UserError

log = logging.getLogger(__name__)
SAMPLES = 8  # texts kept for people to read


def run(config: EvaluateConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model. `generate` and `score` in one folder."""
    if not config.sandbox.allow_code_execution and runs_code(_prompts(config, inputs["prompts"])):  # rather than after hours of decoding
        raise UserError(
            "evaluate.sandbox.allow_code_execution is false, and these prompts are scored by running generated code; "
            "set it to true to run it in the sandbox"
        )
    generate(config, inputs, output, context)
    return score(config, {**inputs, "completions": output}, output, context)


def generate(config: CompletionsConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model. Writes answers-*.parquet and speed-*.parquet (see docs/schemas.md), and goes on from the parts that are there."""
    prompts = _prompts(config, inputs["prompts"])
    check_room("evaluate.max_new_tokens", config.max_new_tokens, inputs["model"], prompts, trust_remote_code=context.trust_remote_code)
    job = AnswerJob(config, inputs["prompts"], inputs["model"], output, context.trust_remote_code, len(prompts))
    todo = job.missing()
    if config.distributed and todo:
        answer_on_ray(job, todo, context)
    from tasks.evaluate.speed import decode_parts

    model, tokenizer, rules = loaded = job.load()
    answer_here(job, loaded)
    decode_parts(config, model, tokenizer, rules, prompts[: config.speed_prompts], output)
    return {"answers": len(prompts), "timed": min(len(prompts), config.speed_prompts)}


def score(config: EvaluateConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model (its provenance), completions (what `generate` wrote). Writes evaluation.json and answers.json. Loads no model."""
    origin = provenance(inputs["model"])
    answers, timed = (list(read_completions(inputs["completions"], kind)) for kind in ("answers", "speed"))
    prompts = {p.id: p for p in _prompts(config, inputs["prompts"])}
    verdicts = _verdicts(prompts, [*answers, *timed], config.sandbox)
    listed = [
        {"id": c.id, "text": c.text, "tokens": len(c.tokens), "stop_reason": c.stop_reason, **verdicts.get((c.id, c.text), {})} for c in answers
    ]
    accuracy = _passed(verdicts, answers)
    artifacts.write_json(output / "answers.json", listed)

    def name(identity: int) -> str:
        return prompts[identity].meta.get("problem_id", str(identity))

    benchmark = next(iter(prompts.values())).meta["problem_set"]
    runs = tables.runs_of(timed)
    named = {(r.setting[0], r.setting[2]): r for r in runs if r.setting[0] in ("ar", *tables.REFERENCES)}
    results, differences = [], []
    for found in runs:
        batch_size = found.setting[2]
        against = {method: r for (method, size), r in named.items() if size == batch_size}
        differences += [{"model": origin["name"], **d} for d in tables.differences(found, name)]
        results.append(
            {
                "model": origin["name"],
                "benchmark": benchmark,
                **tables.row(found, against),
                "dtype": config.dtype,
                "accuracy": accuracy,
                "accuracy_prompts": len(listed) if accuracy is not None else 0,
                "timed_accuracy": _passed(verdicts, found.completions),
                "train_tokens": origin["train_tokens"],
            }
        )
    ours = [r for r in runs if r.is_ours and r.setting[2] == 1]
    artifacts.write_json(
        output / "evaluation.json",
        {
            "model": origin["name"],
            "benchmark": benchmark,
            "model_path": str(inputs["model"]),
            "rows": results,
            "answers": {
                "prompts": len(answers),
                "stop_reasons": dict(Counter(c.stop_reason for c in answers)),
                "degenerate": sum(c.degenerate for c in answers),
            },
            "differences": differences,
            "samples": _samples(prompts, ours[0].completions, ours[-1].completions, listed),
            "accepted_lengths": {_label(r): tables.accepted_lengths(r) for r in runs},
        },
    )
    return _metrics(results, accuracy)


def _prompts(config: CompletionsConfig, folder: Path) -> list[Prompt]:
    rows = artifacts.PromptRows(folder, config.split)
    if not len(rows):
        raise UserError(f"evaluate.split={config.split}: the prompts hold no such prompt")
    return rows.read(range(min(len(rows), config.accuracy_prompts)))


def _verdicts(prompts: Mapping[int, Prompt], completions: Sequence[Completion], sandbox: SandboxConfig) -> dict[tuple[int, str], dict[str, Any]]:
    """By prompt and text, each judged once however many settings said it; empty where prompts do not tell right from wrong."""
    said = list(dict.fromkeys((c.id, c.text) for c in completions))
    found = judge([prompts[identity] for identity, _ in said], [text for _, text in said], sandbox)
    return dict(zip(said, found, strict=True)) if found is not None else {}


def _passed(verdicts: Mapping[tuple[int, str], Mapping[str, Any]], completions: Sequence[Completion]) -> float | None:
    return sum(verdicts[c.id, c.text]["passed"] for c in completions) / len(completions) if verdicts else None


def _label(run: tables.Run) -> str:
    method, block_size, batch_size = run.setting
    return f"{method}@{block_size}" + (f"x{batch_size}" if batch_size > 1 else "")


def _samples(
    prompts: Mapping[int, Prompt], ar: Sequence[Completion], parallel: Sequence[Completion], answers: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    passed = {answer["id"]: answer.get("passed") for answer in answers}
    return [
        {
            "problem_id": prompts[a.id].meta.get("problem_id", str(a.id)),
            "prompt": prompts[a.id].messages[-1]["content"],
            "ar": a.text,
            "jacobi": b.text,
            "passed": passed[a.id],
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
