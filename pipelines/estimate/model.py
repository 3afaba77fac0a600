"""What a model's sizes say about its cost: parameters, bytes of weights and of the KV cache. Reads a config.json, never weights.

Sizes are those of a dense decoder as Hugging Face's config.json names them (Llama, Qwen, Mistral, Gemma, GPT-2 and their kin). A mixture of
experts is not one: its sizes are not guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jacobi_core.decoding.context import stated_context
from tasks.base_model.model_source import ModelSource, resolve_source
from tasks.base_model.pretrain import PretrainConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
TWO_MATRICES = ("gpt2", "gpt_neox", "gptj", "opt", "phi", "falcon", "bloom", "starcoder2")  # feed-forward without a gate
WITH_QKV_BIAS = ("qwen2", "gpt2", "gpt_neox", "opt", "phi", "bloom", "starcoder2")
TIED = ("gpt2", "gemma", "gemma2", "gemma3", "gemma3_text", "opt", "bloom")  # where config.json does not say
NAMES = {  # ours -> theirs
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocabulary": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions"),
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass
class ModelShape:
    """Sizes of a dense decoder. layers = 0: not declared."""

    layers: int = 0
    hidden: int = 0
    intermediate: int = 0  # of the feed-forward
    heads: int = 0
    kv_heads: int = 0  # heads of keys and values; 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
    vocabulary: int = 0
    tied: bool = False  # are embeddings and head one matrix?
    qkv_bias: bool = False
    gated: bool = True  # has the feed-forward a gate (three matrices)?
    context: int = 0  # tokens it can hold; 0: unknown

    @property
    def declared(self) -> bool:
        return min(self.layers, self.hidden, self.intermediate, self.heads, self.vocabulary) > 0

    @property
    def _widths(self) -> tuple[int, int]:
        """Of queries, and of keys (or values)."""
        each = self.head_dim or self.hidden // self.heads
        return each * self.heads, each * (self.kv_heads or self.heads)

    @property
    def layer_parameters(self) -> int:
        queries, keys = self._widths
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + (queries + 2 * keys if self.qkv_bias else 0)
        return attention + (3 if self.gated else 2) * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Embeddings and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.head_parameters + self.hidden

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: all but an embedding that is only looked up."""
        return self.layers * self.layer_parameters + self.vocabulary * self.hidden

    def kv_bytes(self, dtype: str) -> int:
        """Of one token's keys and values."""
        return 2 * self.layers * self._widths[1] * BYTES[dtype]


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """From the contents of a config.json; None where it does not describe a dense decoder by names that are known here."""
    config = {**config, **config.get("text_config", {})}
    if any((config.get(name) or 0) > 1 for name in EXPERTS):
        return None
    found = {ours: next((config[name] for name in theirs if config.get(name)), 0) for ours, theirs in NAMES.items()}
    found["context"] = stated_context(config) or found["context"]
    kind = config.get("model_type", "")
    found["intermediate"] = found["intermediate"] or (4 * found["hidden"] if kind in TWO_MATRICES else 0)
    shape = ModelShape(
        **found,
        tied=bool(config.get("tie_word_embeddings", kind in TIED)),
        qkv_bias=bool(config.get("attention_bias", kind in WITH_QKV_BIAS)),
        gated=kind not in TWO_MATRICES,
    )
    return shape if shape.declared else None


def shape_of_pretrained(config: PretrainConfig, vocabulary: int) -> ModelShape:
    """Of the tiny model that is pretrained here."""
    return ModelShape(
        layers=config.layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        vocabulary=-(-vocabulary // 64) * 64,
        tied=True,
        qkv_bias=True,
        context=config.max_positions,
    )


def find_shape(path: str) -> ModelShape | None:
    """Of the model at `path` (see model_source), by what lies on this machine: the hub is not asked. Raises UserError as model_source does."""
    source = resolve_source(path)
    if source.gguf_file:
        return _gguf_shape(source)
    file = _cached(source.location) if source.hub else Path(source.location, "config.json")
    try:
        return None if file is None else shape_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError):
        return None


def _cached(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return Path(found) if isinstance(found, str) else None


def _gguf_shape(source: ModelSource) -> ModelShape | None:
    """From a GGUF file's header, which names the same sizes otherwise."""
    from gguf import GGUFReader

    reader = GGUFReader(source.file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.") or name.endswith(".model")}
    kind = fields.get("general.architecture", "")
    tensors = {tensor.name: tensor.shape for tensor in reader.tensors}
    config = {
        "model_type": kind,
        "num_hidden_layers": fields.get(f"{kind}.block_count"),
        "hidden_size": fields.get(f"{kind}.embedding_length"),
        "intermediate_size": fields.get(f"{kind}.feed_forward_length"),
        "num_attention_heads": fields.get(f"{kind}.attention.head_count"),
        "num_key_value_heads": fields.get(f"{kind}.attention.head_count_kv"),
        "max_position_embeddings": fields.get(f"{kind}.context_length"),
        "vocab_size": int(tensors["token_embd.weight"][-1]) if "token_embd.weight" in tensors else None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "num_experts": fields.get(f"{kind}.expert_count"),
    }
    return shape_of(config)
