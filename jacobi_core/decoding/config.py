"""Settings of the decoder; free of torch, so that configs can be composed and checked without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Method(str, Enum):
    """How far ahead drafts reach, and what is verified beside them (algorithm sections 1 and 6).

    Members are lower-case: OmegaConf finds enum members by name.
    """

    ar = "ar"  # one token per forward
    jacobi = "jacobi"  # block by block: nothing is committed past the end of the current block; what trajectories record
    running_window = "running_window"  # the block is topped up after every forward (paper section 4.2)
    recycling = "recycling"  # running window, and n-grams of rejected drafts verified as candidates (paper section 3.2)
    multi_block = "multi_block"  # up to max_blocks blocks in flight (paper section 3.2)
    mr = "mr"  # multi_block with recycling: the paper's algorithm 1


@dataclass
class DecodingConfig:
    """Decoding of one prompt, greedy unless temperature is set. Raises ValueError for a value that cannot be used, naming the field."""

    method: Method = Method.jacobi
    block_size: int = 64  # n: tokens refreshed by one forward; 1 for AR
    max_new_tokens: int = 512  # exact cap on returned tokens
    seed: int = 0  # of the random first guess, and of sampling
    max_blocks: int = 2  # K: blocks in flight (multi_block, mr)
    spawn_ratio: float = 0.85  # r: share of the newest block that must be pseudo-accepted before the next one starts
    verification_size: int = 4  # chains verified in one forward, the drafts included (recycling, mr, ngram)
    pool_size: int = 16  # rejected drafts that are kept for recycling
    ngram: bool = False  # candidates copied from prompt + text so far, wherever its last tokens occurred before
    drafts: int = 1  # drafts from different first guesses, refreshed side by side; the first is their consensus (not ar, jacobi)
    auto: bool = False  # feed only the drafts, and only as much of them, as pays on this machine (not ar, jacobi)
    temperature: float = 0.0  # 0: greedy; above: samples, the same ones whatever the method
    top_k: int = 0  # sampling: keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # sampling: keep the likeliest tokens that reach this probability together
    min_p: float = 0.0  # sampling: drop tokens below this share of the likeliest one's probability

    def __post_init__(self) -> None:
        self.method = Method(self.method)
        for name in ("block_size", "max_new_tokens", "max_blocks", "verification_size", "drafts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.pool_size < 0:
            raise ValueError(f"pool_size must not be negative, got {self.pool_size}")
        if not 0 < self.spawn_ratio <= 1:
            raise ValueError(f"spawn_ratio must be above 0 and at most 1, got {self.spawn_ratio}")
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(
                "sampling needs temperature >= 0, top_k >= 0, 0 < top_p <= 1 and 0 <= min_p <= 1, got "
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}, min_p={self.min_p}"
            )
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.min_p):
            raise ValueError("top_k, top_p and min_p do nothing in greedy decoding: set temperature above 0, or leave them out")
        if self.method is Method.ar and (self.block_size != 1 or self.ngram):
            raise ValueError("method=ar decodes one token per forward: block_size must be 1 and ngram false")
        if self.plain and (self.drafts > 1 or self.auto):
            raise ValueError(f"method={self.method.value} is decoded by the book: drafts must be 1 and auto false, or choose another method")
        if self.drafts > self.verification_size:
            raise ValueError(f"drafts ({self.drafts}) are verified too: they cannot exceed verification_size ({self.verification_size})")

    @property
    def recycles(self) -> bool:
        return self.method in (Method.recycling, Method.mr) and self.pool_size > 0

    @property
    def plain(self) -> bool:
        """One draft, every token of it refreshed by every forward: the methods that others are measured against."""
        return self.method in (Method.ar, Method.jacobi)

    @property
    def chains(self) -> int:
        """Most chains of one forward: drafts and candidates."""
        return self.verification_size if self.recycles or self.ngram else self.drafts
