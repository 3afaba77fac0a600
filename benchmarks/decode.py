"""How fast decoding is, as ratios measured side by side in one process; never a test.

    python -m benchmarks.decode [--results results.json] [--smollm2 FOLDER] [--released DIR --released-python PY] [--prompts 16] [--json]

--results, of a finished quickstart, brings the models minicode-base and minicode-round2, --smollm2 the imported SmolLM2-135M; llama-35M is
random and there unless --no-llama. --json prints a list of {"name", "model", "value"} on stdout; what each contestant did goes to stderr.

overhead              our iteration / a bare forward of the same shape, running window at block 32
ar_vs_transformers    tokens per second of our greedy AR / of transformers' own greedy generate
mr_vs_jacobi_tpf      tokens per forward of mr, in the best of three settings (the paper's knobs; 2 and 4 drafts with spawn_ratio 0.3) / of
                      plain jacobi at equal block size; the smallest of blocks 16, 32, 64
best_speedup          tokens per second of the best fixed setting / of our AR
ceiling_share         of running window at block 32: its speedup over AR / what bare forwards of what both fed, timed in this run, would allow
vs_prompt_lookup_tpf, vs_prompt_lookup_tps    adaptive decoding with n-grams / transformers' prompt lookup, on prompts that ask for a copy
vs_released_tpf, vs_released_tps    ours / the authors' released decoder, the smallest of blocks 16, 32, 64; ours is running window with
                      compiled steps at all of them
batch8_vs_batch1      jacobi at block 8: tokens per second at batch 8 / at batch 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch

from benchmarks.contestants import Released, Subject, minicode, random_llama, smollm2
from benchmarks.measure import Run, seconds, side_by_side
from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate, generate_batch
from jacobi_core.decoding.latency import measure_latency

BLOCKS = (16, 32, 64)
torch._dynamo.config.recompile_limit = 64  # every block size compiles its own widths in this process


def show(title: str, runs: dict[str, Run]) -> None:
    print(title, file=sys.stderr)
    for name, run in runs.items():
        tpf = f"{run.tpf:6.2f}" if all(run.forwards) else "     -"
        print(f"  {name:<28} TPF {tpf}  TPS {run.tps:8.1f}", file=sys.stderr, flush=True)


def overhead(subject: Subject) -> float:
    config = DecodingConfig(method=Method.running_window, block_size=32, max_new_tokens=subject.new_tokens)

    def bare(prompt: torch.Tensor) -> tuple[int, int, float]:
        stats = generate(subject.model, prompt, config, rules=subject.rules).stats

        def forwards() -> None:
            with torch.inference_mode():
                forward, length = CachedForward(subject.model), 0
                for fed, committed in zip(stats.fed_per_forward, stats.committed_per_forward, strict=True):
                    forward(torch.zeros(1, fed, dtype=torch.long), keep=min(fed, config.block_size))
                    length += committed + (0 if length else len(prompt) - 1)
                    forward.rollback(min(length, forward.length))

        return stats.tokens, stats.forwards, seconds(forwards)[0]

    runs = side_by_side({"ours": subject.ours(Method.running_window, 32), "bare forwards": bare}, subject.prompts, repeats=2)
    show("overhead", runs)
    return runs["bare forwards"].times_faster_than(runs["ours"])


def ar_vs_transformers(subject: Subject) -> float:
    runs = side_by_side({"our ar": subject.ours(Method.ar, 1), "transformers": subject.transformers()}, subject.prompts, repeats=2)
    show("ar", runs)
    return runs["our ar"].times_faster_than(runs["transformers"])


def methods(subject: Subject) -> dict[str, float]:
    """Every method and block size, interleaved prompt by prompt."""
    contestants = {"ar": subject.ours(Method.ar, 1)}
    for n in BLOCKS:
        for method in (Method.jacobi, Method.running_window, Method.mr):
            contestants[f"{method.value}@{n}"] = subject.ours(method, n)
        contestants[f"mr+2 drafts@{n}"] = subject.ours(Method.mr, n, drafts=2, spawn_ratio=0.3)
        contestants[f"mr+4 drafts@{n}"] = subject.ours(Method.mr, n, drafts=4, spawn_ratio=0.3)
    contestants["auto@64"] = subject.ours(Method.running_window, 64, auto=True)
    contestants["auto+ngram@64"] = subject.ours(Method.running_window, 64, auto=True, ngram=True)
    runs = side_by_side(contestants, subject.prompts, repeats=2)
    show("methods", runs)
    mr = {n: max(run.tpf for name, run in runs.items() if name.startswith("mr") and name.endswith(f"@{n}")) for n in BLOCKS}
    for n in BLOCKS:
        print(f"  mr / jacobi TPF at block {n}: {mr[n] / runs[f'jacobi@{n}'].tpf:.3f}", file=sys.stderr)
    fastest = max((name for name in runs if not name.startswith("auto")), key=lambda name: runs[name].tps)
    speedup = runs[fastest].tps / runs["ar"].tps
    print(f"  fastest: {fastest}, {speedup:.2f}x AR", file=sys.stderr)
    return {"mr_vs_jacobi_tpf": min(mr[n] / runs[f"jacobi@{n}"].tpf for n in BLOCKS), "best_speedup": speedup}


def ceiling_share(subject: Subject) -> float:
    """Of running window at block 32: (TPS / TPS of AR) / (TPF x latency(1) / mean latency of what it fed), prompts left out of both."""
    curve = measure_latency(CachedForward(subject.model), [1, 2, 4, 8, 12, 16, 20, 24, 28, 32])
    print("latency", {m: round(1e3 * s, 2) for m, s in zip(curve.tokens, curve.seconds, strict=True)}, "ms", file=sys.stderr)
    config = DecodingConfig(method=Method.running_window, block_size=32, max_new_tokens=subject.new_tokens)
    runs = side_by_side({"ar": subject.ours(Method.ar, 1), "running_window@32": subject.ours(Method.running_window, 32)}, subject.prompts)
    shares = []
    for i, prompt in enumerate(subject.prompts):
        stats = generate(subject.model, prompt, config, rules=subject.rules).stats
        # both sides read the prompt once: its time is in both, in the ceiling as the bare forwards it takes
        first = seconds_of_prompt(subject, len(prompt) - 1)
        ours = first + sum(curve.at(m) for m in [config.block_size, *stats.fed_per_forward[1:]])
        ar = first + stats.tokens * curve.at(1)
        shares.append((runs["ar"].seconds[i] / runs["running_window@32"].seconds[i]) / (ar / ours))
    return statistics.median(shares)


def seconds_of_prompt(subject: Subject, length: int) -> float:
    """A bare forward over a prompt."""
    with torch.inference_mode():
        return min(seconds(lambda: CachedForward(subject.model)(torch.zeros(1, length, dtype=torch.long), keep=1))[0] for _ in range(3))


def vs_prompt_lookup(subject: Subject) -> dict[str, float]:
    runs = side_by_side(
        {
            "prompt lookup": subject.transformers(prompt_lookup_num_tokens=10),
            "auto + ngram": subject.ours(Method.running_window, 16, ngram=True, auto=True),
            "ar": subject.ours(Method.ar, 1),
        },
        subject.copying,
        repeats=2,
    )
    show("prompts to copy from", runs)
    theirs, ours = runs["prompt lookup"], runs["auto + ngram"]
    return {"vs_prompt_lookup_tpf": ours.tpf / theirs.tpf, "vs_prompt_lookup_tps": ours.times_faster_than(theirs)}


def vs_released(subject: Subject, directory: str, python: str) -> dict[str, float]:
    tpf, tps = [], []
    for n in BLOCKS:
        with Released(subject, directory, python) as released:
            contestants = {
                "released": released.at(n),
                "ours": subject.ours(Method.running_window, n, compiled=True),
                "ours, not compiled": subject.ours(Method.running_window, n),
                "ours, 4 drafts": subject.ours(Method.running_window, n, drafts=4, compiled=True),
            }
            runs = side_by_side(contestants, subject.prompts)
        show(f"released, block {n}", runs)
        tpf.append(runs["ours"].tpf / runs["released"].tpf)
        tps.append(runs["ours"].times_faster_than(runs["released"]))
        print(f"  TPF {tpf[-1]:.3f}x, TPS {tps[-1]:.3f}x", file=sys.stderr, flush=True)
    return {"vs_released_tpf": min(tpf), "vs_released_tps": min(tps)}


def batch8_vs_batch1(subject: Subject) -> float:
    config = DecodingConfig(method=Method.jacobi, block_size=8, max_new_tokens=subject.new_tokens)

    def alone(prompts: list[torch.Tensor]) -> tuple[int, int, float]:
        took, found = seconds(lambda: [generate(subject.model, p, config, rules=subject.rules) for p in prompts])
        return sum(g.stats.tokens for g in found), sum(g.stats.forwards for g in found), took

    def together(prompts: list[torch.Tensor]) -> tuple[int, int, float]:
        ids = [p.tolist() for p in prompts]
        took, found = seconds(lambda: generate_batch(subject.model, ids, config, rules=subject.rules, prompt_ids=[0] * 8))
        return sum(g.stats.tokens for g in found), max(g.stats.forwards for g in found), took

    runs = side_by_side({"batch 1": alone, "batch 8": together}, [[prompt] * 8 for prompt in subject.prompts[:3]])
    show("jacobi at block 8", runs)
    return runs["batch 8"].times_faster_than(runs["batch 1"])


def main(arguments: argparse.Namespace) -> None:
    subjects = [] if arguments.no_llama else [random_llama(arguments.prompts)]
    if arguments.results:
        subjects += minicode(arguments.results, arguments.prompts)
    if arguments.smollm2:
        subjects.append(smollm2(arguments.smollm2, min(arguments.prompts, 6)))
    rows = []
    for subject in subjects:
        print(f"== {subject.label}", file=sys.stderr)
        values = {"overhead": overhead(subject), "ar_vs_transformers": ar_vs_transformers(subject)}
        if subject.label == "llama-35M":
            values["batch8_vs_batch1"] = batch8_vs_batch1(subject)
        if subject.copying:
            values |= vs_prompt_lookup(subject)
        if subject.label.startswith("minicode"):
            values |= methods(subject)
        if subject.label == "minicode-round2":
            values["ceiling_share"] = ceiling_share(subject)
            if arguments.released:
                values |= vs_released(subject, arguments.released, arguments.released_python)
        found = [{"name": name, "model": subject.label, "value": round(value, 3)} for name, value in values.items()]
        print("\n".join(map(json.dumps, found)), file=sys.stderr, flush=True)
        rows += found
    print(json.dumps(rows, indent=1) if arguments.json else "\n".join(f"{r['model']:<16} {r['name']:<22} {r['value']:.3f}" for r in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-llama", action="store_true", help="leave out llama-35M")
    parser.add_argument("--results")
    parser.add_argument("--smollm2")
    parser.add_argument("--released")
    parser.add_argument("--released-python")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    found = parser.parse_args()
    if bool(found.released) != bool(found.released_python):
        parser.error("--released DIR and --released-python PY go together")
    return found


if __name__ == "__main__":
    main(_arguments())
