"""What tests/gpu/evidence.py trains: a small language, a model that learns it, the model's own Jacobi trajectories, distillation on them.

Weights and arithmetic are bfloat16, the optimizer's copies float32. Nothing here has run on a GPU so far.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.distillation.losses import PackedLoss, loss_counts
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import IGNORE, batch_rows, join_samples, pack_trajectory
from jacobi_core.hub import load_model, load_tokenizer
from jacobi_core.trajectories.collect import collect
from jacobi_core.trajectories.record import Trajectory

Record = Callable[[str, float | str], None]
BOS, EOS, STEPS, VALUES = 1, 0, range(2, 10), range(10, 107)  # token ids of the language
PROMPT = 5  # its prompts' tokens


@dataclass(frozen=True)
class Sizes:
    """Of a run; numbers of steps are upper limits, a part ends earlier when its time is over."""

    label: str
    shape: dict[str, Any]  # of a Qwen2Config
    answer: int  # tokens
    block_size: int  # of trajectories and decoding
    pretrain_steps: int
    texts: int  # per pretraining step
    rate: float  # peak learning rate of pretraining
    distill_steps: int
    samples: int  # per distillation step
    distill_rate: float
    trajectories: int
    prompts: int  # decoded when methods are compared
    contexts: tuple[int, ...]  # of the latency curves
    widths: tuple[int, ...]


FULL = Sizes(
    label="qwen2-300M",
    shape=dict(vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=4),
    answer=128,
    block_size=16,
    pretrain_steps=2000,
    texts=64,
    rate=3e-4,
    distill_steps=10_000,
    samples=32,
    distill_rate=1e-4,
    trajectories=1024,
    prompts=6,
    contexts=(128, 2048),
    widths=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
TINY = Sizes(
    label="qwen2-tiny",
    shape=dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
    answer=24,
    block_size=8,
    pretrain_steps=60,
    texts=16,
    rate=1e-2,
    distill_steps=20,
    samples=8,
    distill_rate=2e-3,
    trajectories=32,
    prompts=2,
    contexts=(8, 16),
    widths=(1, 2, 4, 8),
)


@dataclass
class Subject:
    """The model under test. prompts: (how many, seed) -> token ids."""

    label: str
    model: PreTrainedModel
    rules: TokenRules
    sizes: Sizes
    prompts: Callable[[int, int], list[list[int]]]
    pretrained: bool
    trajectories: list[Trajectory] = field(default_factory=list)


def subject(sizes: Sizes, device: torch.device, folder: str | None) -> Subject:
    """A random model that will learn the language, or the checkpoint in `folder`, which is asked to count."""
    if folder is None:
        torch.manual_seed(0)
        config = Qwen2Config(
            **sizes.shape, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS
        )
        model = Qwen2ForCausalLM(config).to(device, torch.bfloat16).eval()
        return Subject(sizes.label, model, TokenRules.of(model), sizes, lambda count, seed: texts(count, length=PROMPT, seed=seed).tolist(), False)
    model, tokenizer = load_model(folder, dtype="bfloat16", device=device), load_tokenizer(folder)

    def counting(count: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        starts = [(draw.randrange(1000), draw.randrange(1, 20)) for _ in range(count)]
        return [tokenizer.encode(f"Count on: {a}, {a + d}, {a + 2 * d}, {a + 3 * d}, {a + 4 * d},") for a, d in starts]

    return Subject(folder.rstrip("/").rpartition("/")[2], model, TokenRules.of(model, tokenizer), replace(sizes, distill_rate=1e-5), counting, True)


def texts(count: int, *, length: int, seed: int) -> torch.Tensor:
    """long [count, length]: a start of text, three step widths, a value, then value after value, modulo their number, by each width in turn."""
    generator = torch.Generator().manual_seed(seed)
    widths = torch.randint(1, len(STEPS) + 1, (count, 3), generator=generator)
    first = torch.randint(len(VALUES), (count, 1), generator=generator)
    more = widths.repeat(1, -(-length // 3))[:, : length - PROMPT]
    values = torch.cat([first, more], 1).cumsum(1) % len(VALUES)
    return torch.cat([torch.full((count, 1), BOS), widths + STEPS[0] - 1, values + VALUES[0]], 1)


class Optimizer:
    """AdamW on float32 copies of the weights: an update is smaller than what bfloat16 resolves."""

    def __init__(self, model: PreTrainedModel, rate: float, *, warmup: int) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.copies = [p.detach().float().clone() for p in self.weights]
        self.adamw = torch.optim.AdamW(self.copies, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adamw, lambda step: min(1.0, (step + 1) / warmup))

    def step(self) -> None:
        for copy, weight in zip(self.copies, self.weights, strict=True):
            copy.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.copies, 1.0)
        self.adamw.step()
        self.schedule.step()
        with torch.no_grad():
            for copy, weight in zip(self.copies, self.weights, strict=True):
                weight.copy_(copy)


def pretrain(it: Subject, record: Record, until: float) -> None:
    """Ordinary next-token training, until the answers are certain. Nothing for a checkpoint."""
    if it.pretrained:
        return
    model, sizes, losses = it.model.train(), it.sizes, []
    optimizer = Optimizer(model, sizes.rate, warmup=max(1, min(50, sizes.pretrain_steps // 10)))
    while len(losses) < sizes.pretrain_steps and time.monotonic() < until and not (len(losses) >= 20 and statistics.mean(losses[-20:]) < 0.005):
        ids = texts(sizes.texts, length=PROMPT + sizes.answer, seed=1_000_000 + len(losses))
        labels = torch.where(torch.arange(ids.shape[1]) < PROMPT, IGNORE, ids)
        loss = model(input_ids=ids.to(model.device), labels=labels.to(model.device), use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    record("pretrain_steps", len(losses))
    record("pretrain_loss", statistics.mean(losses[-20:]))


def gather(it: Subject, record: Record, until: float) -> None:
    """The model's own greedy answers to prompts, and their Jacobi states."""
    wrong, start, chunk = 0, time.monotonic(), min(128, it.sizes.trajectories)
    while len(it.trajectories) < it.sizes.trajectories and (not it.trajectories or time.monotonic() < until):
        done = len(it.trajectories)
        ids = list(range(done, done + chunk))
        how = dict(block_size=it.sizes.block_size, max_new_tokens=it.sizes.answer, seed=0, rules=it.rules, batch_size=chunk)
        found = collect(it.model, it.prompts(chunk, done), ids, **how)
        it.trajectories += found.trajectories
        wrong += found.disagreements
    tokens = sum(len(t.answer_ids) for t in it.trajectories)
    record("trajectories", len(it.trajectories))
    record("trajectory_tokens_per_s", tokens / (time.monotonic() - start))
    record("trajectory_disagreements", wrong / tokens)
    record("jacobi_tpf_of_trajectories", tokens / sum(len(s) - 1 or 1 for t in it.trajectories for s in t.states))


def distill(it: Subject, record: Record, until: float) -> None:
    """Packed rows, the progressive loss, AdamW; flex where it can train. Speed is the median step's, so that compiling does not count."""
    if not it.trajectories:
        raise ValueError("no trajectories to train on")
    schedule = NoiseSchedule(window=8)
    rows = [pack_trajectory(t, schedule)[0] for t in it.trajectories]
    groups = [rows[i : i + it.sizes.samples] for i in range(0, len(rows), it.sizes.samples)]
    batches = [batch_rows([join_samples(group)], multiple_of=128) for group in groups]
    counts = [loss_counts(batch).clamp(min=1).tolist() for batch in batches]
    module = PackedLoss(it.model, window=schedule.window).train()
    optimizer, device = Optimizer(it.model, it.sizes.distill_rate, warmup=min(20, it.sizes.distill_steps)), it.model.device
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    steps: list[tuple[float, float]] = []  # loss, tokens per second
    try:
        while len(steps) < it.sizes.distill_steps and (not steps or time.monotonic() < until):
            start, number = time.perf_counter(), len(steps) % len(batches)
            consistency, ar = counts[number]
            loss = module(batches[number].to(device), consistency_weight=1 / consistency, ar_weight=1 / ar).loss
            loss.backward()
            optimizer.step()
            value = loss.item()
            if cuda:
                torch.cuda.synchronize()
            steps.append((value, int((batches[number].sample >= 0).sum()) / (time.perf_counter() - start)))
    finally:
        it.model.eval()
    record(f"distill_backend_{module._attention.backend.value}", 1)
    record("distill_steps", len(steps))
    record("packed_tokens_per_s", statistics.median(speed for _, speed in steps))
    record("distill_loss_start", _mean(steps[:10]))
    record("distill_loss_end", _mean(steps[-10:]))
    if cuda:
        record("distill_peak_memory_mb", torch.cuda.max_memory_allocated() / 2**20)


def _mean(steps: Sequence[tuple[float, float]]) -> float:
    return statistics.mean(loss for loss, _ in steps)
