"""How many texts may be decoded together: rows and KV memory are bounded, and who does not fit waits. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jacobi_core.decoding.config import DecodingConfig, Method


@dataclass(frozen=True)
class Need:
    """Of one text. capacity: most tokens it may reach, prompt included; widest: most tokens one of its forwards feeds behind what it holds."""

    prompt: int
    capacity: int
    widest: int

    @classmethod
    def of(cls, prompt: int, config: DecodingConfig) -> Need:
        blocks = config.max_blocks if config.method in (Method.multi_block, Method.mr) else 1
        reach = min(config.block_size * blocks, config.max_new_tokens)
        return cls(prompt, prompt + config.max_new_tokens, 1 + config.chains * (reach - 1))


@dataclass(frozen=True)
class Limits:
    """rows: texts decoded together. kv_tokens: the cache holds rows x columns, and never more than so many tokens. prefill_tokens: prompts
    that begin in one iteration fill at most so many places (one prompt always may), so that those who are running go on."""

    rows: int
    kv_tokens: int
    prefill_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("rows", "kv_tokens", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def columns(self, needs: Sequence[Need]) -> int:
        """Of a cache that these texts cannot outgrow."""
        return max(n.capacity for n in needs) + max(n.widest for n in needs)

    def fit(self, needs: Sequence[Need]) -> bool:
        return len(needs) <= self.rows and len(needs) * self.columns(needs) <= self.kv_tokens

    def admitted(self, running: Sequence[Need], waiting: Sequence[Need]) -> int:
        """How many of those who wait may begin now. First come, first served: nobody overtakes, so a long text's turn comes."""
        count = 0
        while count < len(waiting):
            begin = waiting[: count + 1]
            if not self.fit([*running, *begin]) or (count and len(begin) * max(n.prompt for n in begin) > self.prefill_tokens):
                break
            count += 1
        return count

    def shape(self, needs: Sequence[Need], now: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the buffers: those of `now` where these texts fit, else larger in powers of two where memory allows."""
        rows, columns = len(needs), self.columns(needs)
        if rows <= now[0] and columns <= now[1]:
            return now
        ample = (max(min(1 << (rows - 1).bit_length(), self.rows), now[0]), max(-(-columns // 128) * 128, now[1]))
        for shape in (ample, (ample[0], columns), (rows, ample[1])):
            if shape[0] * shape[1] <= self.kv_tokens:
                return shape
        return rows, columns
