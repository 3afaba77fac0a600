"""A checkpoint as a running service: model, tokenizer, engine and its thread. What one replica holds."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.serving.metrics import Metrics
from tasks.serving.settings import ServingSettings
from tasks.serving.worker import Worker
from tasks.stage import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Service:
    """tokenizer: the event loop's; the worker has its own. context: most tokens of a text, None where the model knows no limit."""

    settings: ServingSettings
    tokenizer: PreTrainedTokenizerBase
    worker: Worker
    metrics: Metrics = field(repr=False)
    context: int | None


def start_service(settings: ServingSettings, *, to_ray: bool = False) -> Service:
    """Load, warm up, begin. Raises UserError for a checkpoint that cannot be served."""
    from jacobi_core import hub

    try:
        tokenizer = hub.load_tokenizer(settings.model, trust_remote_code=settings.trust_remote_code)
        model = hub.load_model(settings.model, dtype=settings.dtype, trust_remote_code=settings.trust_remote_code)
    except Exception as error:  # every library below raises its own kinds
        raise UserError(f"model={settings.model}: cannot be loaded ({' '.join(str(error).split())[:300]})") from error
    return service_of(model, tokenizer, settings, to_ray=to_ray)


def service_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: ServingSettings, *, to_ray: bool = False) -> Service:
    """Of a loaded model. Raises UserError where its kind cannot be decoded in a batch, or the KV memory does not hold one short text."""
    from jacobi_core.decoding.cache import context_length
    from jacobi_core.decoding.config import DecodingConfig
    from jacobi_core.decoding.tokens import TokenRules
    from jacobi_core.serving.admission import Limits
    from jacobi_core.serving.engine import Engine

    try:
        token_bytes = _token_bytes(model)
        limits = Limits(rows=settings.rows, kv_tokens=max(settings.kv_megabytes * 2**20 // token_bytes, 1))
        engine = Engine(model, TokenRules.of(model, tokenizer), limits)
        engine.warm_up(DecodingConfig(**settings.decoding))
    except ValueError as error:
        raise UserError(f"model={settings.model}: cannot be served ({error})") from error
    metrics = Metrics(to_ray=to_ray)
    worker = Worker(engine, copy.deepcopy(tokenizer), metrics, token_bytes=token_bytes, stall_seconds=settings.stall_seconds)
    worker.start()
    return Service(settings, tokenizer, worker, metrics, context_length(model))


def _token_bytes(model: PreTrainedModel) -> int:
    """Of the KV cache, per token."""
    import torch

    from jacobi_core.decoding.cache import CachedForward

    forward = CachedForward(model)
    with torch.inference_mode():
        forward(torch.tensor([[0]], device=model.device), keep=1)
    return sum(t.nbytes for layer in forward.cache.layers for t in (layer.keys, layer.values))
