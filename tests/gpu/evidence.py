"""One run that says what a GPU does: the core's tests, a model distilled there, latency curves, tokens per forward and per second.

    python -m tests.gpu.evidence [--minutes 6] [--json FILE] [--device cuda] [--model DIR] [--tiny]

Torch and transformers (the version that pyproject.toml asks for), pytest and hypothesis; no Ray, no MLflow, no Hydra. --minutes: for all
of it; every part has a share of what is left, a failed part is told and the next one begins. --model: a checkpoint that is taken as it is, instead
of a random 300 M Qwen2 that first learns a small language; --tiny: a toy instead, in seconds, on a CPU too. --json writes a list of
{"name", "model", "value"} after every part. Ends with 1 where anything failed.

tests_*                  of tests/gpu and tests/core
pretrain_*               steps, loss at the end
trajectory_*             the model's own greedy answers and their Jacobi states
packed_tokens_per_s, distill_*    distillation in bfloat16: loss at start and end (KL + cross-entropy per token), peak memory
latency_ms_C_M           a forward over M tokens behind C, batch 1; free_tokens_C: at most 1.1 times as long as one; graphs_*: steps captured
tpf_*, tps_*, speedup_*  medians over held-out prompts, taking turns, after one to warm up; speedup: over ar_graphs. same_*: share of answers
                         that are ar_eager's, in bfloat16
equal_float32            share of answers that equal a plain greedy loop's, of every method, in float32; anything but 1 is a failure

Nothing of this has run on a GPU so far: no such device was at hand. tests/core/test_gpu_evidence.py runs it on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.doctor import certify
from jacobi_core.decoding.forwards import Forward
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.latency import measure_latency, tokens_held
from jacobi_core.decoding.static_forward import StaticForward, widths_for
from tests.gpu.evidence_training import FULL, TINY, Record, Sizes, Subject, distill, gather, pretrain, subject

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = 999_999_999  # seed of the prompts that are decoded
GRACE = 10  # seconds after its time in which a part may end by itself
PYTEST = ["-m", "pytest", "-v", "-rN", "--tb=short", "-p", "no:cacheprovider", "-m", "not slow"]
TESTS = ["tests/gpu", "tests/core", "--ignore=tests/core/test_gpu_evidence.py"]
TINY_TESTS = ["tests/gpu/test_core.py", "tests/core/test_context.py"]


def tests(it: Subject, record: Record, until: float) -> None:
    """In processes of their own, several where pytest-xdist is there. Interrupted when their time is over: what was told by then counts."""
    command = [sys.executable, *PYTEST, *(TINY_TESTS if it.sizes.label == TINY.label else TESTS)]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(max(1, (os.cpu_count() or 2) // 2))]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            for allowed in (until - start, GRACE / 2):  # then one Ctrl-C, then the end
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(1.0, allowed))
                    break
                process.send_signal(signal.SIGINT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the workers too
        output.seek(0)
        told = output.read()
    print(told, file=sys.stderr, flush=True)
    for what, count in outcomes(told).items():
        record(f"tests_{what}", count)
    record("tests_seconds", time.monotonic() - start)
    if process.wait():  # also where they were interrupted
        raise AssertionError(f"pytest ended with {process.returncode} after {time.monotonic() - start:.0f} s: {told[-200:]}")


def outcomes(told: str) -> dict[str, int]:
    """Of `pytest -v` with or without workers, however it ended: it has no last line where it was killed."""
    lines = {what: rf"(?m)^(?:\[gw\d+\] \[ *\d+%\] |\S+::.* ){what}\b" for what in ("PASSED", "FAILED", "SKIPPED", "ERROR")}
    return {what.lower(): len(re.findall(line, told)) for what, line in lines.items()}


def latency(it: Subject, record: Record, until: float) -> None:
    """By the forward that decodes one text on this device with static shapes, as the stage measure_latency does."""
    for context in it.sizes.contexts:
        forward = StaticForward(it.model, capacity=tokens_held(it.sizes.widths, context=context), widths=it.sizes.widths)
        curve = measure_latency(forward, it.sizes.widths, context=context)
        for tokens, seconds in zip(curve.tokens, curve.seconds, strict=True):
            record(f"latency_ms_{context}_{tokens}", 1e3 * seconds)
        record(f"free_tokens_{context}", curve.free_tokens(1.1))
        record(f"graphs_latency_{context}", graphs(forward))


def graphs(forward: StaticForward) -> int:
    """Captured steps. Raises where CUDA has not captured all: figures would be those of eager steps."""
    captured = sum(step.graph is not None for step in forward._steps.values())
    if forward.model.device.type == "cuda" and captured < len(forward._steps):
        raise AssertionError(f"only {captured} of {len(forward._steps)} steps were captured in a CUDA graph")
    return captured


def configs(it: Subject) -> dict[str, DecodingConfig]:
    """Name -> setting, ar first."""
    new, n = it.sizes.answer, it.sizes.block_size
    found = {"ar": DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=new)}
    return found | {m.value: DecodingConfig(method=m, block_size=n, max_new_tokens=new) for m in (Method.jacobi, Method.running_window, Method.mr)}


def speeds(it: Subject, record: Record, until: float) -> None:
    """Every contestant on every prompt, each time another one first."""
    prompts = [torch.tensor(p) for p in it.prompts(it.sizes.prompts, HELD_OUT)]
    capacity = max(map(len, prompts)) + it.sizes.answer
    settings = configs(it)
    static = {name: StaticForward(it.model, capacity=capacity, widths=widths_for(config)) for name, config in settings.items()}
    contestants: dict[str, tuple[DecodingConfig, Callable[[], Forward]]] = {"ar_eager": (settings["ar"], lambda: CachedForward(it.model))}
    for name, config in settings.items():
        static[name].capture()
        contestants["ar_graphs" if name == "ar" else name] = (config, lambda name=name: static[name])
    found: dict[str, list[tuple[float, float, list[int]]]] = {name: [] for name in contestants}  # tokens per forward and per second, the tokens
    for turn, prompt in enumerate([prompts[0], *prompts]):
        if turn > 1 and time.monotonic() > until:
            break
        names = list(contestants)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            config, forward = contestants[name]
            start = time.perf_counter()
            made = generate(it.model, prompt, config, rules=it.rules, forward=forward())
            if turn:  # the first warms up
                found[name].append((made.stats.tpf, made.stats.tokens / (time.perf_counter() - start), made.new_tokens.tolist()))
    record("prompts_decoded", len(found["ar_eager"]))
    for name, runs in found.items():
        record(f"tpf_{name}", statistics.median(tpf for tpf, _, _ in runs))
        record(f"tps_{name}", statistics.median(tps for _, tps, _ in runs))
        record(f"speedup_{name}", statistics.median(mine[1] / ar[1] for mine, ar in zip(runs, found["ar_graphs"], strict=True)))
        record(f"same_{name}", statistics.mean(mine[2] == ar[2] for mine, ar in zip(runs, found["ar_eager"], strict=True)))
    for name, forward in static.items():
        record(f"graphs_{name}", graphs(forward))


def equality(it: Subject, record: Record, until: float) -> None:
    """Raises where a parallel answer is not greedy AR's, a near-tie included."""
    model = copy.deepcopy(it.model).float()
    certificate = certify(model, it.prompts(it.sizes.prompts, HELD_OUT), list(configs(it).items()), rules=it.rules)
    record("equal_float32", certificate.equal_share)
    if certificate.findings:
        raise AssertionError(f"{len(certificate.findings)} answers are not greedy AR's in float32, first {certificate.findings[0]}")


# name, share of the time, what it does
PARTS = (
    ("tests", 0.32, tests),
    ("pretrain", 0.12, pretrain),
    ("trajectories", 0.08, gather),
    ("distill", 0.26, distill),
    ("latency", 0.06, latency),
    ("speeds", 0.10, speeds),
    ("equality", 0.06, equality),
)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread, as soon as Python has the word again."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"not finished after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(it: Subject, *, minutes: float, file: Path | None) -> list[dict[str, Any]]:
    """All parts, whatever becomes of each. Time that one leaves is the later ones'."""
    rows: list[dict[str, Any]] = []

    def record(name: str, value: float | str) -> None:
        value = round(value, 4) if isinstance(value, float) else value
        rows.append({"name": name, "model": it.label, "value": value})
        print(f"{it.label:<12} {name:<32} {value}", flush=True)

    record("date", datetime.now(UTC).date().isoformat())
    record("device", torch.cuda.get_device_name() if it.model.device.type == "cuda" else "cpu")
    record("torch", torch.__version__)
    record("transformers", importlib.metadata.version("transformers"))
    record("million_parameters", sum(p.numel() for p in it.model.parameters()) / 1e6)
    end = time.monotonic() + 60 * minutes
    for number, (name, share, part) in enumerate(PARTS):
        start = time.monotonic()
        seconds = max(1.0, (end - start) * share / sum(share for _, share, _ in PARTS[number:]))
        try:
            with at_most(seconds + GRACE):
                part(it, record, start + seconds)
        except Exception as error:  # the machine is lent for minutes: the next part may still find something
            traceback.print_exc()
            record("failed", f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        record(f"seconds_{name}", time.monotonic() - start)
        if file is not None:
            file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    sizes: Sizes = TINY if options.tiny else FULL
    rows = run(subject(sizes, torch.device(options.device), options.model), minutes=options.minutes, file=options.json)
    failures = [row["value"] for row in rows if row["name"] == "failed"]
    print("\n".join(["", f"{len(failures)} of {len(PARTS)} parts failed", *failures]))
    return 1 if failures else 0


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model")
    parser.add_argument("--tiny", action="store_true")
    found = parser.parse_args(given)
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; on a CPU: --device cpu --tiny")
    version = importlib.metadata.version("transformers")
    if tuple(map(int, version.split(".")[:2])) < (5, 24):  # their forwards take no `cache=`, some without a word
        parser.error(f"transformers {version} is older than 5.24; bring its wheel and put it on PYTHONPATH")
    return found


if __name__ == "__main__":
    sys.exit(main())
