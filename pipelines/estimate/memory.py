"""Memory of one device while it trains, or decodes: weights, optimizer, activations, KV cache. By arithmetic; docs/recipes.md does one by hand."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.estimate.model import BYTES, ModelShape
from tasks.distill.config import DistillConfig

GB = 1e9
CHUNK_LOGITS = 2**26  # of jacobi_core.distillation.losses, which needs torch to be imported
LOGIT_TENSORS = 4  # of such a chunk, in float32 (measured: 1,057 MB)
TOGETHER = {True: 16384, False: 2048}  # answer tokens that iterate together while trajectories are collected, on a GPU or not


@dataclass(frozen=True)
class Memory:
    """GB. start: at once, while a whole model is loaded before it is sharded."""

    weights: float = 0.0
    optimizer: float = 0.0  # gradients too
    activations: float = 0.0  # logits too
    kv: float = 0.0
    start: float = 0.0

    @property
    def total(self) -> float:
        return max(self.weights + self.optimizer + self.activations + self.kv, self.start)


def kept_per_token(shape: ModelShape) -> int:
    """Values that one layer keeps of a token for its backward pass: eight as wide as the model (norms, queries, keys, values, attention,
    residuals), four as wide as the feed-forward (gate, up, activation, product)."""
    return 8 * shape.hidden + 4 * shape.intermediate


def training_memory(shape: ModelShape, config: DistillConfig, *, ranks: int, row: int, gpu: bool) -> Memory:
    """Of one rank. row: tokens of a packed row."""
    master, compute = BYTES[config.dtype], 2 if gpu else BYTES[config.dtype]
    shards = ranks if gpu or ranks > 1 else 1
    trained = adapter_parameters(shape, config.lora.rank) if config.lora.rank else shape.parameters
    gathered = (shape.head_parameters + 2 * shape.layer_parameters) * compute if shards > 1 or gpu else 0  # root unit, this block, the next
    if not gpu and shards > 1:
        gathered = shape.parameters * compute  # a CPU keeps what it has gathered until the backward is done
    tokens = row * max(1, config.batch_size // (ranks * config.accumulation))
    if config.activation_checkpointing:
        kept = shape.layers * shape.hidden + kept_per_token(shape)
    else:
        kept = shape.layers * kept_per_token(shape)
    logits = min(tokens * shape.vocabulary, CHUNK_LOGITS) * 4 * LOGIT_TENSORS
    return Memory(
        weights=(shape.parameters * master / shards + gathered) / GB,
        optimizer=3 * trained * master / shards / GB,
        activations=(tokens * kept * compute + logits) / GB,
        start=shape.parameters * master * (1 + (1 / shards if shards > 1 or gpu else 0)) / GB,
    )


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Of low-rank adapters on every linear layer but the head."""
    each = shape.head_dim or shape.hidden // shape.heads
    queries, keys, hidden, wide = each * shape.heads, each * (shape.kv_heads or shape.heads), shape.hidden, shape.intermediate
    sides = 2 * (hidden + queries) + 2 * (hidden + keys) + (3 if shape.gated else 2) * (hidden + wide)
    return shape.layers * rank * sides


def decoding_memory(shape: ModelShape, *, dtype: str, texts: int, longest: int, wide: int = 0) -> Memory:
    """Of one process. texts: decoded together, each of `longest` tokens at most. wide: most tokens of one forward, where there are wide ones."""
    size = BYTES[dtype]
    tokens = max(wide, texts)
    return Memory(
        weights=shape.parameters * size / GB,
        activations=tokens * (4 * shape.hidden + 3 * shape.intermediate + shape.vocabulary) * size / GB,  # one layer's, and logits
        kv=max(texts * longest, wide) * shape.kv_bytes(dtype) / GB,
    )
