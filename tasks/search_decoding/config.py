"""Settings of the search, and the decoding settings it chooses from. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from jacobi_core.decoding.config import DecodingConfig, Method
from tasks.evaluate.config import turned
from tasks.stage import check_dtype

KNOBS = ("max_blocks", "spawn_ratio", "verification_size", "ngram", "drafts", "auto")  # what candidates of one method and block size differ in
CARRIED = ("method", "block_size", *KNOBS, "pool_size")  # what a winner is described by: everything but caps, seeds and sampling


@dataclass
class SearchDecodingConfig:
    """Raises ValueError naming the field for a value that cannot be used."""

    split: str = "validation"  # prompts that the search may see
    prompts: int = 32  # of them, at most
    heldout_split: str = "test"  # the winner is measured again on these
    heldout_prompts: int = 32
    methods: list[Method] = field(default_factory=lambda: [m for m in Method if m is not Method.ar])
    block_sizes: list[int] = field(default_factory=lambda: [8, 16, 32, 64, 128])
    max_blocks: list[int] = field(default_factory=lambda: [2, 3])
    spawn_ratios: list[float] = field(default_factory=lambda: [0.3, 0.6, 0.85])
    verification_sizes: list[int] = field(default_factory=lambda: [2, 4, 8])
    drafts: list[int] = field(default_factory=lambda: [1, 2, 4])
    ngram: bool = True  # try candidates copied from the text so far
    auto: bool = True  # try settings that feed only what pays on this machine
    max_new_tokens: int = 256
    budget_s: float = 270.0  # wall time of it all, the model's loading and the last measurement too; every part gets at least one prompt
    keep_one_in: int = 4  # of a round's settings
    finalists: int = 4  # beside greedy AR and the paper's setting, which are always measured
    seed: int = 0  # of the order of measurements and of random first guesses
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self.methods = [Method(m) for m in self.methods]
        for name in ("prompts", "heldout_prompts", "max_new_tokens", "finalists"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.keep_one_in < 2:
            raise ValueError(f"keep_one_in must be at least 2, got {self.keep_one_in}")
        if self.budget_s <= 0:
            raise ValueError(f"budget_s must be above 0, got {self.budget_s}")
        if self.heldout_split == self.split:
            raise ValueError(f"heldout_split must be another split than the one searched on, got {self.split}")
        check_dtype("dtype", self.dtype)
        self.candidates()  # every value must be usable

    def greedy_ar(self) -> DecodingConfig:
        return DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=self.max_new_tokens, seed=self.seed)

    def paper(self) -> DecodingConfig:
        """n = 64, verification size 4, K = 2, r = 0.85: what the paper's search ended with (algorithm section 6)."""
        return DecodingConfig(
            method=Method.mr,
            block_size=64,
            max_blocks=2,
            spawn_ratio=0.85,
            verification_size=4,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
        )

    def candidates(self) -> list[DecodingConfig]:
        """Every method at every block size, plain and with one knob turned; the paper's setting first. What cannot matter is left out: a block
        longer than the answer, a knob the method does not have."""
        found = [self.paper()]
        for method in self.methods:
            if method is Method.ar:
                continue
            for n in self.block_sizes:
                if n > max(self.max_new_tokens, min(self.block_sizes)):
                    continue
                plain = DecodingConfig(method=method, block_size=n, max_new_tokens=self.max_new_tokens, seed=self.seed)
                found += [replace(plain, **knobs) for knobs in self._knobs(plain)]
        return unique(found)

    def _knobs(self, plain: DecodingConfig) -> Iterator[dict[str, Any]]:
        yield {}
        if plain.method in (Method.multi_block, Method.mr):
            yield from ({"max_blocks": k} for k in self.max_blocks)
            yield from ({"spawn_ratio": r} for r in self.spawn_ratios)
        if plain.recycles:
            yield from ({"verification_size": v} for v in self.verification_sizes)
        if self.ngram:
            yield {"ngram": True}
        if not plain.plain:
            yield from ({"drafts": d, "verification_size": max(d, plain.verification_size)} for d in self.drafts)
            if self.auto:
                yield {"auto": True}
                if self.ngram:
                    yield {"auto": True, "ngram": True}


def unique(configs: Iterable[DecodingConfig]) -> list[DecodingConfig]:
    found: list[DecodingConfig] = []
    for config in configs:
        if config not in found:
            found.append(config)
    return found


def crossed(survivors: Sequence[DecodingConfig]) -> list[DecodingConfig]:
    """Of every two survivors of one method and block size, best pairs first: the setting that has what is turned in either."""
    plain, found = DecodingConfig(), []
    for a, b in combinations(survivors, 2):
        if (a.method, a.block_size) == (b.method, b.block_size):
            turned = {k: getattr(c, k) for c in (b, a) for k in KNOBS if getattr(c, k) != getattr(plain, k)}
            turned["verification_size"] = max(turned.get("verification_size", plain.verification_size), turned.get("drafts", 1))
            found.append(replace(a, **turned))
    return [c for c in unique(found) if c not in survivors]


def carried(config: DecodingConfig) -> dict[str, Any]:
    """The settings that an export can carry as its default, as JSON values."""
    return {name: getattr(config, name).value if name == "method" else getattr(config, name) for name in CARRIED}


def label(config: DecodingConfig) -> str:
    """Short and unique: the method, its block size, and every knob that is turned."""
    found = turned(config)
    return f"{config.method.value}@{config.block_size}" + (f" ({', '.join(found)})" if found else "")
