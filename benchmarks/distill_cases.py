"""What the distillation benchmark trains and packs: synthetic rows, the steps set against each other, and how much memory one of them takes.

    python -m benchmarks.distill_cases step|pack JSON

is how the benchmark starts a process of its own for one memory figure: it prints one JSON object. Linux only (/proc).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.contestants import random_llama
from benchmarks.measure import seconds
from benchmarks.stub_trajectories import stub_trajectory
from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from jacobi_core.distillation.losses import PackedLoss, loss_counts
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import IGNORE, Kind, PackedRow, batch_rows, pack_trajectory
from jacobi_core.trajectories.record import Trajectory
from tasks import trajectory_files

Step = Callable[[PackedRow], float]
PROMPT = 128  # tokens before every answer that is trained on
VOCABULARY = 8192
MASKS = {  # what peak memory is asked of: variant and window
    "nc16": (MaskVariant.nc, 16),
    "nc1": (MaskVariant.nc, 1),
    "nc_ic": (MaskVariant.nc_ic, 16),
}


def llama(size: str = "35M", *, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """Random weights, the same ones every time, in training mode. 35M: the decoding benchmark's, 8 layers; toy: 2 layers, hidden 16."""
    if size == "35M":
        return random_llama(1).model.train()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return LlamaForCausalLM(config).train()


def row(identity: int, *, answer: int, window: int = 16, block_size: int = 16, vocabulary: int = VOCABULARY) -> PackedRow:
    """One sample of PROMPT + 2 x answer tokens, linear schedule (window 1: cllm), as a batch [1, L]."""
    generator = torch.Generator().manual_seed(identity)
    found = stub_trajectory(
        identity,
        torch.randint(10, vocabulary, (PROMPT,), generator=generator).numpy(),
        length=answer,
        block_size=block_size,
        vocabulary=vocabulary,
    )
    states = [torch.from_numpy(s).long() for s in found.states]
    tokens = (torch.from_numpy(t).long() for t in (found.prompt_ids, found.answer_ids))
    trajectory = Trajectory(found.id, *tokens, found.stop_reason, block_size, states)
    return batch_rows([pack_trajectory(trajectory, NoiseSchedule(kind="linear" if window > 1 else "cllm", window=window))[0]])


def packed_step(model: PreTrainedModel, backend: Backend, *, variant: MaskVariant = MaskVariant.nc, window: int = 16) -> Step:
    """Forward and backward of the packed loss; the loss."""
    module = PackedLoss(model, window=window, variant=variant, backend=backend)

    def step(batch: PackedRow) -> float:
        consistency, ar = weights(batch)
        loss = module(batch, consistency_weight=consistency, ar_weight=ar).loss
        loss.backward()
        return loss.item()

    return step


def plain_step(model: PreTrainedModel) -> Step:
    """Forward and backward of an ordinary causal language model on as many tokens."""

    def step(batch: PackedRow) -> float:
        loss = model(input_ids=batch.input_ids, labels=batch.input_ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    return step


def with_adamw(model: PreTrainedModel, step: Step) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def run(batch: PackedRow) -> float:
        loss = step(batch)
        optimizer.step()
        return loss

    return run


def per_block_step(model: PreTrainedModel) -> Step:
    """The same loss as a window of 1 gives, one forward and backward per noisy block, as CLLM does: [clean text before it, noisy block], taught
    by the logits of one forward over the clean text, which also has the AR loss. Lean: logits of the block only, blocks without noise left out.
    """

    def step(batch: PackedRow) -> float:
        one = PackedRow(**{name: field[0] for name, field in vars(batch).items()})
        consistency, ar = weights(batch)
        clean = one.kind != Kind.NOISY
        text, labels = one.input_ids[clean], one.labels[clean]
        logits = model(input_ids=text[None], use_cache=False).logits[0].float()
        loss = ar * F.cross_entropy(logits[labels != IGNORE], labels[labels != IGNORE], reduction="sum")
        loss.backward()
        total, teachers = loss.item(), F.log_softmax(logits.detach(), -1)
        for block in range(int(one.block.max()) + 1):
            noisy = (one.kind == Kind.NOISY) & (one.block == block)
            counted = one.teacher[noisy] >= 0
            if not counted.any():
                continue
            position = one.position_ids[noisy]
            ids = torch.cat([text[: position[0]], one.input_ids[noisy]])
            student = model(input_ids=ids[None], use_cache=False, logits_to_keep=len(position)).logits[0][counted].float()
            loss = consistency * F.kl_div(F.log_softmax(student, -1), teachers[position[counted]], reduction="sum", log_target=True)
            loss.backward()
            total += loss.item()
        return total

    return step


def weights(batch: PackedRow) -> list[float]:
    """1 / how many tokens each of the two losses has."""
    return [1 / max(1, count) for count in loss_counts(batch).tolist()]


def write_parts(folder: Path, count: int, *, per_part: int = 5000) -> list[Path]:
    """`count` synthetic trajectories, answers of 64 to 192 tokens and prompts of 32 to 96, in parts; holds one part at a time."""
    folder.mkdir(parents=True)
    parts = []
    for shard, start in enumerate(range(0, count, per_part)):
        ids = range(start, min(count, start + per_part))
        found = [stub_trajectory(i, range(10, 42 + i % 65), length=64 + (37 * i) % 129) for i in ids]
        parts.append(trajectory_files.trajectory_part(folder, shard))
        trajectory_files.write_trajectories(parts[-1], found)
    return parts


# ---- one memory figure, in a process of its own


def memory_of_step(*, length: int, mask: str, backend: str, threads: int, size: str = "35M", vocabulary: int = VOCABULARY) -> dict[str, float]:
    """mb: what one step of `length` tokens adds to the resident memory at its peak, its gradients included; no activation checkpointing."""
    torch.set_num_threads(threads)
    variant, window = MASKS[mask]
    model = llama(size, vocabulary=vocabulary)
    step = packed_step(model, Backend(backend), variant=variant, window=window)
    batch = row(0, answer=(length - PROMPT) // 2, window=window, vocabulary=vocabulary)
    grown, spent, _ = peak_mb(lambda: step(batch))
    return {"mb": grown, "seconds": spent}


def memory_of_packing(*, trajectories: str, output: str) -> dict[str, float]:
    """mb: what the stage adds to the resident memory at its peak; what it counted; seconds."""
    from tasks.pack_sequences import PackConfig, run
    from tasks.stage import StageContext

    Path(output).mkdir(parents=True)
    config = PackConfig(max_length=2048)
    grown, spent, found = peak_mb(lambda: run(config, {"trajectories": Path(trajectories)}, Path(output), StageContext()))
    return {"mb": grown, "seconds": spent, "rows": found["rows"], "samples": found["samples"], "fill_ratio": found["fill_ratio"]}


def peak_mb(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """MB by which the process's resident memory grew at its peak, seconds, and what it returned.

    getrusage's ru_maxrss would do no: a child inherits its parent's.
    """
    before = status_mb("VmRSS")
    spent, found = seconds(work)
    return status_mb("VmHWM") - before, spent, found


def status_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def main(arguments: Sequence[str]) -> None:
    work = {"step": memory_of_step, "pack": memory_of_packing}[arguments[0]]
    print(json.dumps(work(**json.loads(arguments[1]))))


if __name__ == "__main__":
    main(sys.argv[1:])
