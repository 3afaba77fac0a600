"""Stage `measure_latency`: how long a forward over m tokens takes on this machine, by batch size and context (the paper's Figure 5).

Writes latency.json: one curve per batch size and context, its knee, and how many tokens are free. The weights do not matter, only their
shape: what was measured once for a machine, a shape and a dtype is kept in `cache` and serves every round.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
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
# of a model's config: what cannot change how long a forward takes. All else may: architectures name their sizes as they like
NAMES = {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "task_specific_params"}


@dataclass
class MeasureLatencyConfig:
    """Raises ValueError naming the field for a value that cannot be used."""

    tokens: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256])  # fed per text
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 16])  # texts
    contexts: list[int] = field(default_factory=lambda: [128, 1024])  # tokens in the cache; those the model cannot hold are left out
    free_ratio: float = 1.1  # tokens are free as long as they take at most so many times as long as one
    limit_s: float = 1.0  # no wider forward is tried after one that took longer, but always two
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
    from jacobi_core.hub import ATTENTION, default_device, load_model
    from tasks.machine import hardware

    shape = _without_names(artifacts.read_json(Path(inputs["model"], "config.json")))
    subject = {"hardware": hardware(), "device": str(default_device()), "shape": shape, "dtype": config.dtype, "attention": ATTENTION}
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
    """What tells this machine from another, and what it computes with, without importing torch: for the fingerprint of what was measured on it.

    device: the one that will be used, as far as it shows without asking torch. torch_threads: as set for this process, None for torch's choice.
    threads_sleep: there only where they do.
    """
    from tasks.machine import cpu_model, gpu_names

    names = gpu_names()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch = importlib.metadata.version("torch")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1")
    return {
        "cpu": cpu_model(),
        "cores": cores,
        "gpus": names,
        "torch": torch,
        "torch_threads": os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"),
        "device": "cuda" if names and not hidden and not torch.endswith("+cpu") else "cpu",
        "visible_gpus": visible if names else None,
        **_asleep(),
    }


def _asleep() -> dict[str, bool]:
    """Named only where it is so: what was measured before anybody asked keeps its fingerprint."""
    from tasks.machine import threads_sleep

    return {"threads_sleep": True} if threads_sleep() else {}


def _without_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config, and the configs in it, without names, labels, token ids and dtype: the same for all checkpoints of one shape."""
    kept = {key: value for key, value in config.items() if key not in NAMES and not key.endswith(("token_id", "token_ids"))}
    return {key: _without_names(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _kept(config: MeasureLatencyConfig, subject: Mapping[str, Any]) -> Path | None:
    """Where this measurement is kept: named by all that can change it."""
    if config.cache is None:
        return None
    import torch

    asked = [config.tokens, config.batch_sizes, config.contexts, config.free_ratio, config.limit_s]
    machine = {k: subject["hardware"][k] for k in ("cpu", "cores", "gpus", "torch_threads")} | _asleep()
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
