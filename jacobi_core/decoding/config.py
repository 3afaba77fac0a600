"""Settings of the decoder; free of torch, so that configs can be composed and checked without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Method(str, Enum):
    """How drafts are made and committed (algorithm section 1). Members are lower-case: OmegaConf finds enum members by name."""

    ar = "ar"  # one token per forward
    jacobi = "jacobi"  # block by block: nothing is committed past the end of the current block; what trajectories record
    running_window = "running_window"  # the block is topped up after every forward (paper section 4.2)


@dataclass
class DecodingConfig:
    """Greedy decoding of one prompt. Raises ValueError for a value that cannot be used, naming the field."""

    method: Method = Method.jacobi
    block_size: int = 64  # n: tokens refreshed by one forward; 1 for AR
    max_new_tokens: int = 512  # exact cap on returned tokens
    seed: int = 0  # of the random first guess

    def __post_init__(self) -> None:
        self.method = Method(self.method)
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.method is Method.ar and self.block_size != 1:
            raise ValueError(f"method=ar decodes one token per forward: block_size must be 1, got {self.block_size}")
