"""Pretrain the tiny base model: a Qwen2 of a few million parameters, from random weights, on question and answer token ids.

Knows nothing about problems, files or chat templates. Runs in this process, on CPU, with weights in fp32.
Importing this module for its config is light: torch and transformers are imported where they are used.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.stage import Reporter

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

Example = tuple[list[int], list[int]]  # prompt ids, answer ids
IGNORED = -100  # label without a loss
POOL_BATCHES = 16  # rows are sorted by length within this many batches, so that a batch holds little padding


@dataclass
class PretrainConfig:
    """Model size and training settings."""

    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 4
    heads: int = 8
    kv_heads: int = 8
    max_positions: int = 2048  # longest prompt + answer, in tokens
    steps: int = 1700
    batch_size: int = 8  # rows per step
    learning_rate: float = 1.5e-3
    warmup: int = 40  # steps
    weight_decay: float = 0.05
    short_first: int = 0  # short minicode problems, one pass over them before the prompts' own: copying constants is learnt from them far sooner
    prompt_loss: bool = False  # also learn to predict the prompt, whose words are mostly drawn at random
    compute_dtype: str = "float32"  # of matrix products; bfloat16 is faster where the CPU multiplies it itself (amx_bf16), slower elsewhere
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"compute_dtype: must be float32 or bfloat16, got {self.compute_dtype!r}")
        for name in ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "max_positions", "steps", "batch_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.short_first < self.steps * self.batch_size:
            raise ValueError(f"short_first: must lie between 0 and the {self.steps * self.batch_size} rows of all steps, got {self.short_first}")
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(f"heads: {self.heads} must split hidden_size {self.hidden_size} into even widths and be a multiple of kv_heads")


def build_model(tokenizer: PreTrainedTokenizerBase, config: PretrainConfig) -> Qwen2ForCausalLM:
    """A randomly initialised model in fp32; embedding rows are padded to a multiple of 64, so some ids have no token."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(config.seed)
    end_of_turn, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=(len(tokenizer) + 63) // 64 * 64,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=[end_of_turn, padding],
            pad_token_id=padding,
            dtype="float32",
        )
    )
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[end_of_turn, padding], pad_token_id=padding)
    return model


def batches(
    examples: Sequence[Example], *, batch_size: int, padding: int, prompt_loss: bool, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless epochs of (input_ids, labels), both [batch, length], right padded: under a causal mask padding needs no attention mask."""
    import torch

    rng = random.Random(seed)
    order: list[int] = []
    while True:
        while len(order) < batch_size * POOL_BATCHES:
            order += rng.sample(range(len(examples)), len(examples))
        pool, order = order[: batch_size * POOL_BATCHES], order[batch_size * POOL_BATCHES :]
        pool.sort(key=lambda index: len(examples[index][0]) + len(examples[index][1]))
        groups = [pool[start : start + batch_size] for start in range(0, len(pool), batch_size)]
        rng.shuffle(groups)
        for group in groups:
            length = max(len(examples[index][0]) + len(examples[index][1]) for index in group)
            input_ids = torch.full((batch_size, length), padding)
            labels = torch.full((batch_size, length), IGNORED)
            for row, index in enumerate(group):
                prompt, answer = examples[index]
                ids = torch.tensor(prompt + answer)
                input_ids[row, : len(ids)] = ids
                start = 0 if prompt_loss else len(prompt)
                labels[row, start : len(ids)] = ids[start:]
            yield input_ids, labels


def pretrain(
    examples: Sequence[Example],
    *,
    first: Sequence[Example] = (),
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainConfig,
    report: Reporter,
) -> Qwen2ForCausalLM:
    """Train on (prompt ids with the generation prompt, answer ids with <|im_end|>); returns the model in eval mode.

    `first` are shown in one pass before the examples, within the same steps and learning rate schedule. The same examples, config and thread count
    give the same weights, bit for bit. Reports `loss` (nats per token), `learning_rate` and `tokens` (fed so far, padding excluded).
    ValueError for no examples or one longer than `max_positions`.
    """
    import torch

    if not examples:
        raise ValueError("examples: none to pretrain on")
    longest = max(len(prompt) + len(answer) for prompt, answer in itertools.chain(first, examples))
    if longest > config.max_positions:
        raise ValueError(f"max_positions: {config.max_positions} is less than the longest example of {longest} tokens")
    settings = {"batch_size": config.batch_size, "padding": tokenizer.pad_token_id, "prompt_loss": config.prompt_loss, "seed": config.seed}
    once = itertools.islice(batches(first, **settings), len(first) // config.batch_size)
    stream = itertools.chain(once, batches(examples, **settings))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        return _train(build_model(tokenizer, config).train(), stream, tokenizer.pad_token_id, config, report)
    finally:
        torch.set_num_threads(threads_before)


def _train(
    model: Qwen2ForCausalLM, stream: Iterator[tuple[torch.Tensor, torch.Tensor]], padding: int, config: PretrainConfig, report: Reporter
) -> Qwen2ForCausalLM:
    import torch
    from tqdm import tqdm
    from transformers import get_scheduler

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=config.warmup, num_training_steps=config.steps)
    tokens = 0
    progress = tqdm(range(1, config.steps + 1), desc="pretrain", unit="step", mininterval=5)
    for step in progress:
        input_ids, labels = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.compute_dtype == "bfloat16"):
            loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        tokens += int((input_ids != padding).sum())
        if step % 10 == 0 or step == config.steps:
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            report({"loss": loss.item(), "learning_rate": scheduler.get_last_lr()[0], "tokens": tokens}, step)
    return model.eval()
