"""Stage `measure_latency`: how long a forward over m tokens takes on this machine, by batch size and context (the paper's Figure 5).

Writes latency.json: one curve per batch size and context, its knee, and how many tokens are free. The weights do not matter, only their
shape: what was measured once for a machine, a shape and a dtype is kept in `cache` and serves every round.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import artifacts
from tasks.stage import NOT_HASHED, StageContext, check_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jacobi_core.decoding.latency import LatencyCurve

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
# of a model's config: what decides how long a forward takes
SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


@dataclass
class MeasureLatencyConfig:
    """Raises ValueError naming the field for a value that cannot be used."""

    tokens: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256])  # fed per text
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 16])  # texts
    contexts: list[int] = field(default_factory=lambda: [128, 1024])  # tokens in the cache; those the model cannot hold are left out
    free_ratio: float = 1.1  # tokens are free as long as they take at most so many times as long as one
    limit_s: float = 1.0  # no wider forward is tried after one that took longer
    dtype: str = "float32"
    cache: str | None = field(default=None, metadata=NOT_HASHED)  # folder of earlier measurements; none: measure

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_sizes", "contexts"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name} must hold numbers from 1 up, got {values}")
        if self.tokens != sorted(set(self.tokens)) or self.tokens[0] != 1:
            raise ValueError(f"tokens must rise, and begin with 1, got {self.tokens}")
        for name, least in (("free_ratio", 1), ("limit_s", 0)):
            if getattr(self, name) <= least:
                raise ValueError(f"{name} must be above {least}, got {getattr(self, name)}")
        check_dtype("dtype", self.dtype)


def run(config: MeasureLatencyConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: model. Writes latency.json (see docs/schemas.md)."""
    from jacobi_core.hub import default_device, load_model
    from tasks.report import hardware

    subject = {"hardware": hardware(), "device": str(default_device()), "shape": _shape(inputs["model"]), "dtype": config.dtype}
    kept = _kept(config, subject)
    if kept is not None and kept.exists():
        found = artifacts.read_json(kept)
        log.info("latency: measured before on this machine for this shape and dtype")
    else:
        model = load_model(inputs["model"], dtype=config.dtype, trust_remote_code=context.trust_remote_code)
        found = {"schema_version": SCHEMA_VERSION, **subject, "free_ratio": config.free_ratio, "curves": list(_curves(config, model))}
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            artifacts.write_json(kept, found)
    artifacts.write_json(output / "latency.json", found)
    return _metrics(found["curves"])


def machine_identity() -> dict[str, Any]:
    """What tells this machine from another, without importing torch: for the fingerprint of what was measured on it."""
    from tasks.report import cpu_model

    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [line.partition(":")[2].strip() for file in gpus for line in file.read_text().splitlines() if line.startswith("Model")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu_model(), "cores": cores, "gpus": names}


def _shape(model: Path) -> dict[str, Any]:
    config = artifacts.read_json(Path(model, "config.json"))
    config |= config.get("text_config", {})
    return {name: config[name] for name in SHAPE if config.get(name) is not None}


def _kept(config: MeasureLatencyConfig, subject: Mapping[str, Any]) -> Path | None:
    """Where this measurement is kept: named by all that can change it."""
    if config.cache is None:
        return None
    import torch

    asked = [config.tokens, config.batch_sizes, config.contexts, config.free_ratio, config.limit_s]
    machine = {k: subject["hardware"][k] for k in ("cpu", "cores", "gpus", "torch_threads")}
    key = json.dumps([SCHEMA_VERSION, {**subject, "hardware": machine}, asked, torch.__version__], sort_keys=True)
    return Path(config.cache, f"latency-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json")


def _curves(config: MeasureLatencyConfig, model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    from jacobi_core.decoding.cache import context_length
    from jacobi_core.decoding.latency import measure_latency, tokens_held

    limit = context_length(model)
    for batch_size in config.batch_sizes:
        for length in config.contexts:
            widths = [m for m in config.tokens if limit is None or tokens_held(config.tokens, context=length) + m <= limit]
            if not widths:
                log.warning("latency: a context of %d tokens is more than this model holds (%d); left out", length, limit)
                continue
            forward = _forward(model, widths, rows=batch_size, capacity=tokens_held(widths, context=length))
            curve = measure_latency(forward, widths, context=length, rows=batch_size, limit=config.limit_s)
            yield _record(curve, batch_size, length, config.free_ratio)
            log.info("latency: batch %d, context %d: one token %.2f ms", batch_size, length, 1e3 * curve.seconds[0])


def _forward(model: PreTrainedModel, widths: list[int], *, rows: int, capacity: int) -> Any:
    """What decodes so many texts on this device."""
    from jacobi_core.decoding.batch import BatchForward
    from jacobi_core.decoding.config import DecodingConfig
    from jacobi_core.decoding.forwards import forward_for
    from jacobi_core.decoding.static_forward import StaticForward

    if rows > 1:
        return BatchForward(model, rows)
    forward = forward_for(model, DecodingConfig(), capacity)
    return StaticForward(model, capacity=capacity, widths=widths) if isinstance(forward, StaticForward) else forward


def _record(curve: LatencyCurve, batch_size: int, length: int, ratio: float) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "context": length,
        "tokens": list(curve.tokens),
        "seconds": list(curve.seconds),
        "beside": curve.beside,
        "knee": curve.knee(),
        "free_tokens": curve.free_tokens(ratio),
    }


def _metrics(curves: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for curve in curves:
        where = f"batch{curve['batch_size']}/context{curve['context']}"
        found |= {f"{where}/free_tokens": curve["free_tokens"], f"{where}/knee": curve["knee"], f"{where}/one_token_ms": 1e3 * curve["seconds"][0]}
    return found
