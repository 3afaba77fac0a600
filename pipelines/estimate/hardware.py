"""How fast a device is said to be: declared figures, for stages that nothing has been measured of yet. docs/recipes.md says where each is from.

A forward costs the largest of three: its products (at a share of the device's peak), reading weights and cache (at its memory's bandwidth), and
a least time per layer, which is what launching kernels one by one takes: on a GPU that is what a single text's forward costs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pipelines.estimate.model import BYTES, ModelShape


@dataclass(frozen=True)
class Hardware:
    """One device: a GPU, or a core of a CPU."""

    name: str
    memory_gb: float | None  # None: the machine's, shared by all workers
    tflops: float  # dense, in the dtype that it computes in
    bandwidth_gb: float  # per second, of its memory
    layer_ms: float  # least time of one layer of a forward
    training_share: float  # of tflops, while training
    decoding_share: float  # of tflops, in wide forwards

    def forward_seconds(self, shape: ModelShape, *, tokens: float, cached: float = 0, dtype: str = "bfloat16") -> float:
        """Of one forward over `tokens`, with so many tokens in the cache (of all texts together)."""
        products = 2 * shape.multiplied * tokens / (1e12 * self.tflops * self.decoding_share)
        read = (BYTES[dtype] * shape.multiplied + shape.kv_bytes(dtype) * cached) / (1e9 * self.bandwidth_gb)
        return max(products, read, 1e-3 * self.layer_ms * shape.layers)

    def training_seconds(self, shape: ModelShape, *, tokens: float, recompute: bool) -> float:
        """Forward, backward and, with activation checkpointing, the forward once more."""
        return (8 if recompute else 6) * shape.multiplied * tokens / (1e12 * self.tflops * self.training_share)


HARDWARE = {
    h.name: h
    for h in (
        Hardware("A100", 80, 312, 2039, 0.86, 0.40, 0.45),
        Hardware("H100", 80, 989, 3350, 0.60, 0.30, 0.35),
        Hardware("H200", 141, 989, 4800, 0.60, 0.30, 0.35),
        Hardware("B200", 180, 2250, 8000, 0.43, 0.25, 0.30),
        Hardware("cpu", None, 0.1, 12, 0.1, 0.40, 0.40),
    )
}
NOT_SEEN = "H100"  # taken where GPUs are asked for and this machine has none


def hardware_for(name: str | None, *, seen: list[str], gpus: bool, **changed: float | None) -> Hardware:
    """By name, else by the GPUs that this machine has (`seen`), else NOT_SEEN; `cpu` where no GPU is asked for. changed: figures that replace the
    table's."""
    if name is None:
        here = next((known for known in HARDWARE for gpu in seen if known in gpu), NOT_SEEN)
        name = here if gpus else "cpu"
    return dataclasses.replace(HARDWARE[name], **{key: value for key, value in changed.items() if value is not None})
