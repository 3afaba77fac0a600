"""What a run says about itself: sums over the steps since the last point, and the points made of them."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
import torch.distributed as dist

from jacobi_core.distillation.losses import LossTerms

MEASURED = ("tokens_per_second", "data_wait_share", "memory_mb")  # of this machine at this hour; all else is reproducible
SCALARS = 3  # before the two parts by window position: AR loss, AR tokens, agreement


class Curves:
    """Sums are those of all ranks after every step, so that a checkpoint may be taken at any of them, by any number of ranks."""

    def __init__(self, *, window: int, ar_weight: float, device: torch.device, workers: int) -> None:
        self.window, self.ar_weight, self.workers = window, ar_weight, workers
        self.points: list[dict[str, float]] = []
        self._step_sums = torch.zeros(SCALARS + 2 * window, dtype=torch.float64, device=device)
        self._sums = torch.zeros_like(self._step_sums)
        self._since = time.monotonic()
        self._tokens, self._waited = 0, 0.0

    def state(self) -> dict[str, Any]:
        """JSON types; the same on every rank."""
        return {"points": self.points, "sums": self._sums.tolist()}

    def load_state(self, state: dict[str, Any], *, tokens: int) -> None:
        """tokens: packed ones until then; the clock starts anew."""
        self.points, self._tokens, self._since = state["points"], tokens, time.monotonic()
        self._sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))

    def add(self, terms: LossTerms, labels: int) -> None:
        """One forward's terms; labels: its AR tokens."""
        scalars = torch.stack([terms.ar.double(), terms.ar.new_tensor(labels, dtype=torch.float64), terms.agreement.double()])
        self._step_sums += torch.cat([scalars, terms.consistency.double(), terms.noisy_tokens.double()])

    def end_step(self) -> None:
        """Collective."""
        if self.workers > 1:
            dist.all_reduce(self._step_sums)
        self._sums += self._step_sums
        self._step_sums.zero_()

    def point(self, step: int, *, gradient_norm: float, learning_rate: float, tokens: int, waited: float) -> dict[str, float]:
        """Means since the last point. tokens: packed, from the first step on; waited: seconds for data, from the start of this process."""
        ar, labels, agreement, *positions = self._sums.tolist()
        consistency, noisy = positions[: self.window], positions[self.window :]
        elapsed = max(time.monotonic() - self._since, 1e-9)
        mean, ar = sum(consistency) / max(sum(noisy), 1), ar / max(labels, 1)
        point = {
            "loss": mean + self.ar_weight * ar,
            "consistency": mean,
            "ar": ar,
            "agreement": agreement / max(sum(noisy), 1),  # share of counted noisy tokens whose argmax is the teacher's
            "gradient_norm": gradient_norm,
            "learning_rate": learning_rate,
            "tokens": tokens,
            "tokens_per_second": (tokens - self._tokens) / elapsed,
            "data_wait_share": (waited - self._waited) / elapsed,
            "memory_mb": _memory_mb(self._sums.device),
        }
        if self.window > 1:
            by_position = zip(consistency, noisy, strict=True)
            point |= {f"consistency_position_{i:02d}": total / count for i, (total, count) in enumerate(by_position) if count}
        self.points.append({"step": step, **point})
        self._sums.zero_()
        self._since, self._tokens, self._waited = time.monotonic(), tokens, waited
        return point


def _memory_mb(device: torch.device) -> float:
    """The most this rank has used: on the device, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
