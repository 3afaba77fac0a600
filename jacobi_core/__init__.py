"""Jacobi Forcing (arXiv 2512.14681): turn a causal language model into a causal parallel decoder, and decode with it.

torch and transformers only; no Ray, MLflow, Hydra or files beyond loading and saving a model. The public names below are
imported on first use, so that reading a config never costs an import of torch.
"""

from importlib import import_module

_PUBLIC = {
    "DecodingConfig": "jacobi_core.decoding.config",
    "Method": "jacobi_core.decoding.config",
    "TokenRules": "jacobi_core.decoding.tokens",
    "generate": "jacobi_core.decoding.generate",
    "generate_batch": "jacobi_core.decoding.generate",
    "jacobi_generate": "jacobi_core.decoding.hf_generate",
    "checkpoint_generate": "jacobi_core.decoding.checkpoint_generate",
    "stream": "jacobi_core.decoding.stream",
    "greedy_batch": "jacobi_core.decoding.greedy_batch",
    "compare_with_ar": "jacobi_core.decoding.equivalence",
    "certify": "jacobi_core.decoding.doctor",
    "Trajectory": "jacobi_core.trajectories.record",
    "collect": "jacobi_core.trajectories.collect",
    "NoiseSchedule": "jacobi_core.distillation.noise_schedule",
    "pack_trajectory": "jacobi_core.distillation.packing",
    "dense_mask": "jacobi_core.distillation.attention",
    "PackedLoss": "jacobi_core.distillation.losses",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jacobi_core' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
