"""How fast distillation trains and packs, and in how much memory; ratios are of steps that took turns in one process. Never a test.

    python -m benchmarks.distill [--only NAME ...] [--trajectories 100000] [--json]
    python -m benchmarks.distill --gpu [--json]

Model: the random 35 M Llama, fp32; rows: one synthetic sample each, blocks of 16, so that no checkpoint is needed. A step is forward and backward.
--json prints a list of {"name", "model", "value"} on stdout; what each contestant did goes to stderr.

step_vs_plain_lm       seconds of a packed step (`sliced`, NC, window 16, 2048 tokens) / of a plain causal LM step (sdpa) on 2048 tokens;
                       _dense: of `dense`; _adamw: both with AdamW's step
dense_vs_sliced        seconds of a `dense` step / of a `sliced` one
packed_vs_per_block    seconds of one forward and backward per noisy block and one over the clean text, as CLLM does / of one packed step
                       with the same loss (window 1); the smallest of 8x16, 8x64, 16x32 and 32x16 (blocks x tokens)
memory_mb_B_M_L        what one step of L tokens adds to resident memory at its peak, in a process of its own; B: backend, M: nc16 and nc1 (NC with
                       that window) or nc_ic; memory_mb: the largest of `sliced`
memory_ratio_M_L       `sliced` / `dense`; memory_ratio: the largest
head_mb                the same for 16,384 tokens and a vocabulary of 151,936, of a model so small that only its head and the loss count
packing_rows_per_s     packed rows written per second, of 2048 tokens at most; packing_samples_per_s: trajectories read
packing_mb             what packing --trajectories adds to resident memory at its peak; packing_mb_growth: that / what a tenth of them adds
data_share             seconds to read and batch a random row of a packed file / seconds of a `sliced` step on one; nothing prefetched
data_wait_share        what Trainer, which prefetches, says of its own first four steps of one such row
gpu_step_flex, _flash  --gpu only, bf16, 16,384 tokens, window 16: seconds of a packed step / of a plain step with the quicker of sdpa and
                       flash-attn; gpu_memory_flex, _flash: the same of peak device memory; _w64: with window 64, where flash copies a third
                       of the keys. Who cannot take the rows is left out, and the reason goes to stderr
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.distill_cases import MASKS, PROMPT, Step, llama, packed_step, per_block_step, plain_step, row, with_adamw, write_parts
from benchmarks.measure import Run, seconds, side_by_side
from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from jacobi_core.distillation.losses import PackedLoss
from jacobi_core.distillation.model_order import model_order
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import PackedRow, batch_rows
from jacobi_core.distillation.segments import SegmentPlan, flash_kernel

Named = dict[str, float]


def turns(steps: Mapping[str, Step], models: Mapping[str, torch.nn.Module], batches: list[PackedRow], *, repeats: int = 3) -> dict[str, Run]:
    """Each on every batch; gradients are dropped outside the time."""

    def timed(name: str) -> Callable[[PackedRow], tuple[int, int, float]]:
        def run(batch: PackedRow) -> tuple[int, int, float]:
            models[name].zero_grad(set_to_none=True)
            spent, _ = seconds(lambda: steps[name](batch))
            return batch.input_ids.numel(), 1, spent

        return run

    runs = side_by_side({name: timed(name) for name in steps}, batches, repeats=repeats)
    for name, run in runs.items():
        print(f"  {name:<28} {statistics.median(run.seconds):8.3f} s a step  {run.tps:8.0f} tokens/s", file=sys.stderr, flush=True)
    return runs


def step_vs_plain_lm(options: argparse.Namespace) -> Named:
    names = ["plain", "sliced", "dense", "plain + AdamW", "sliced + AdamW"]
    models = {name: llama(options.size) for name in names}  # one each: a backend may set what its model attends with
    steps = {name: plain_step(m) if name.startswith("plain") else packed_step(m, Backend(name.split()[0])) for name, m in models.items()}
    steps |= {name: with_adamw(models[name], steps[name]) for name in names if "AdamW" in name}
    runs = turns(steps, models, [row(i, answer=options.answer) for i in range(3)])
    return {
        "step_vs_plain_lm": runs["plain"].times_faster_than(runs["sliced"]),
        "step_vs_plain_lm_dense": runs["plain"].times_faster_than(runs["dense"]),
        "step_vs_plain_lm_adamw": runs["plain + AdamW"].times_faster_than(runs["sliced + AdamW"]),
        "dense_vs_sliced": runs["sliced"].times_faster_than(runs["dense"]),
    }


def packed_vs_per_block(options: argparse.Namespace) -> Named:
    models = {"packed": llama(options.size), "one forward per block": llama(options.size)}
    steps = {
        "packed": packed_step(models["packed"], Backend.sliced, window=1),
        "one forward per block": per_block_step(models["one forward per block"]),
    }
    ratios = []
    for blocks, n in options.blocks:
        batch = row(blocks, answer=blocks * n, window=1, block_size=n)
        print(f"  {blocks} blocks of {n}: {len(batch)} tokens packed", file=sys.stderr)
        runs = turns(steps, models, [batch], repeats=2)
        ratios.append(runs["packed"].times_faster_than(runs["one forward per block"]))
        print(f"    {ratios[-1]:.2f}x", file=sys.stderr, flush=True)
    return {"packed_vs_per_block": min(ratios)}


def memory_mb(options: argparse.Namespace) -> Named:
    values, ratios, settings = {}, {}, {"threads": torch.get_num_threads(), "size": options.size}
    for length in options.lengths:
        for mask in MASKS:
            for backend in ("dense", "sliced"):
                found = child("step", length=length, mask=mask, backend=backend, **settings)
                values[f"memory_mb_{backend}_{mask}_{length}"] = found["mb"]
            dense, sliced = (values[f"memory_mb_{backend}_{mask}_{length}"] for backend in ("dense", "sliced"))
            ratios[f"memory_ratio_{mask}_{length}"] = sliced / dense
            print(f"  {mask:<6} {length:>5} tokens: dense {dense:7.0f} MB, sliced {sliced:7.0f} MB", file=sys.stderr, flush=True)
    largest = {"memory_mb": max(v for name, v in values.items() if "sliced" in name), "memory_ratio": max(ratios.values())}
    return values | ratios | largest


def head_mb(options: argparse.Namespace) -> Named:
    length, vocabulary = options.head
    found = child("step", length=length, mask="nc16", backend="sliced", threads=torch.get_num_threads(), size="toy", vocabulary=vocabulary)
    print(f"  {length} tokens x {vocabulary}: {found['mb']:.0f} MB, {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    return {"head_mb": found["mb"]}


def packing(options: argparse.Namespace) -> Named:
    with tempfile.TemporaryDirectory() as folder:
        whole, tenth = Path(folder, "whole"), Path(folder, "tenth")
        parts = write_parts(whole, options.trajectories, per_part=max(1, options.trajectories // 20))
        tenth.mkdir()
        for part in parts[:2]:
            (tenth / part.name).hardlink_to(part)
        few, all_ = (child("pack", trajectories=str(path), output=str(Path(folder, f"packed-{path.name}"))) for path in (tenth, whole))
    for found in (few, all_):
        print(
            f"  {found['samples']} samples in {found['rows']} rows, {found['fill_ratio']:.3f} full: {found['seconds']:.1f} s, {found['mb']:.0f} MB",
            file=sys.stderr,
            flush=True,
        )
    return {
        "packing_rows_per_s": all_["rows"] / all_["seconds"],
        "packing_samples_per_s": all_["samples"] / all_["seconds"],
        "packing_mb": all_["mb"],
        "packing_mb_growth": all_["mb"] / few["mb"],
    }


def data_share(options: argparse.Namespace) -> Named:
    from tasks.distill.config import DistillConfig
    from tasks.distill.data import StepPlan
    from tasks.distill.loop import Trainer
    from tasks.packed_files import PackedRows, write_packed

    def written() -> Iterator[PackedRow]:
        for i in range(options.rows):
            yield PackedRow(**{name: field[0] for name, field in vars(row(i, answer=options.answer)).items()})

    model = llama(options.size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "packed.parquet")
        write_packed(path, written(), schedule=NoiseSchedule(window=16), max_length=PROMPT + 2 * options.answer)
        rows = PackedRows(path)
        order = np.random.default_rng(0).permutation(len(rows))
        reads = [seconds(lambda i=i: batch_rows(rows.read([i]), multiple_of=rows.bucket)) for i in order]
        runs = turns({"sliced": packed_step(model, Backend.sliced)}, {"sliced": model}, [batch for _, batch in reads[:3]])
        config = DistillConfig(batch_size=1, max_steps=4, log_every=4, checkpoint_every=4, attention=Backend.sliced)
        trainer = Trainer(PackedLoss(model, window=16, backend=Backend.sliced), rows, StepPlan.make(config, rows.lengths), config)
        points: list[dict[str, float]] = []
        trainer.run(log=lambda point, step: points.append(point), save=lambda trainer: None)
    read = statistics.mean(spent for spent, _ in reads)
    print(f"  read and batched a row of {len(reads[0][1])} tokens in {1e3 * read:.2f} ms", file=sys.stderr, flush=True)
    return {"data_share": read / statistics.median(runs["sliced"].seconds), "data_wait_share": points[-1]["data_wait_share"]}


def gpu(options: argparse.Namespace) -> Named:
    """Not run so far: no machine with a GPU was at hand."""
    values: Named = {}
    for window in (16, 64):
        print(f"  window {window}", file=sys.stderr)
        batches = [row(i, answer=(options.gpu_length - PROMPT) // 2, window=window).to(torch.device(options.gpu_device)) for i in range(3)]
        models, steps, peaks = gpu_contestants(options, batches[0], window)
        runs = turns(steps, models, batches)
        plain = max((name for name in runs if name.startswith("plain")), key=lambda name: runs[name].tps)
        for name in runs.keys() & {"flex", "flash"}:
            label = name if window == 16 else f"{name}_w{window}"
            values[f"gpu_step_{label}"] = runs[plain].times_faster_than(runs[name])
            values[f"gpu_memory_{label}"] = peaks[name] / peaks[plain]
    return dict(sorted(values.items()))


def gpu_contestants(options: argparse.Namespace, batch: PackedRow, window: int) -> tuple[dict[str, torch.nn.Module], dict[str, Step], dict[str, int]]:
    """Model, step and peak bytes of those that did a first step on `batch`; of the others, why not, on stderr."""
    models, steps, peaks = {}, {}, {}
    for name in ("plain, sdpa", "plain, flash_attention_2", "flex", "flash"):
        try:
            model = llama(options.size).to(options.gpu_device, torch.bfloat16)
            if name.startswith("plain"):
                model.set_attn_implementation(name.removeprefix("plain, "))
            if name == "flash":  # else PackedAttention would compute what it cannot take by sliced, and that would be timed
                SegmentPlan.of(model_order(batch), MaskVariant.nc, kernel=flash_kernel())
            step = plain_step(model) if name.startswith("plain") else packed_step(model, Backend(name), window=window)
            peaks[name] = gpu_peak(model, step, batch)
        except (ValueError, ImportError, RuntimeError) as error:  # refused, not installed, or failed on the device (out of memory, no kernel)
            print(f"  {name}: left out, {' '.join(str(error).split())}", file=sys.stderr)
            continue
        models[name], steps[name] = model, step
        print(f"  {name:<28} {peaks[name] / 2**20:8.0f} MB", file=sys.stderr)
    return models, steps, peaks


def gpu_peak(model: torch.nn.Module, step: Step, batch: PackedRow) -> int:
    """Bytes that a step adds at its peak, its gradients included; after one to compile and warm up."""
    step(batch)  # ends with .item(), which waits for the device
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(batch)
    model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated() - before


def child(work: str, **settings: Any) -> dict[str, float]:
    """What a fresh process found (distill_cases.py): its memory is its own.

    In a step's, glibc gives freed tensors back at once: by its own choice peaks of the same step differ by 60 MB.
    """
    command = [sys.executable, "-m", "benchmarks.distill_cases", work, json.dumps(settings)]
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if work == "step" else {})
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


MEASURES: dict[str, Callable[[argparse.Namespace], Named]] = {
    "step_vs_plain_lm": step_vs_plain_lm,
    "packed_vs_per_block": packed_vs_per_block,
    "memory_mb": memory_mb,
    "head_mb": head_mb,
    "packing": packing,
    "data_share": data_share,
}
MODELS = {"head_mb": "llama-toy", "packing": "none"}  # where it is not the 35 M Llama


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, measure in {"gpu": gpu}.items() if options.gpu else MEASURES.items():
        if options.gpu or not options.only or name in options.only:
            print(name, file=sys.stderr, flush=True)
            label = MODELS.get(name, f"llama-{options.size}")
            rows += [{"name": key, "model": label, "value": round(value, 4)} for key, value in measure(options).items()]
    print(json.dumps(rows, indent=1) if options.json else "\n".join(f"{r['model']:<16} {r['name']:<28} {r['value']:.3f}" for r in rows))
    return rows


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), metavar="NAME", help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--trajectories", type=int, default=100_000, help="to pack")
    parser.add_argument("--gpu", action="store_true", help="flex and flash at 16,384 tokens, nothing else")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(size="35M", answer=960, blocks=[(8, 16), (8, 64), (16, 32), (32, 16)], lengths=[1024, 2048, 4096])
    parser.set_defaults(head=(16_384, 151_936), rows=256, gpu_length=16_384, gpu_device="cuda")
    found = parser.parse_args(given)
    if found.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA device, and there is none")
    return found


if __name__ == "__main__":
    main(arguments())
