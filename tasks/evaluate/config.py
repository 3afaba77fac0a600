"""Settings of the stages `*/answers`, `*/speed` and `*/evaluate`. Users write one section that holds them all. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dashboards.paper_table import Reference
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.trajectories.quality import LOOP_REPEATS, QualityRules
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.stage import NOT_HASHED, check_dtype

# of a setting, what no variant has of its own: rows are compared prompt by prompt, and their answers with greedy AR's
_SHARED = ("max_new_tokens", "seed", "temperature", "top_k", "top_p", "min_p")


@dataclass
class TextConfig:
    """What both kinds of decoding share. Raises ValueError naming the field for a value that cannot be used, as all below do."""

    split: str = "test"
    max_new_tokens: int = 256
    loop_tokens: int = QualityRules.loop_tokens  # an answer that repeats one n-gram over so many tokens (or half of itself) is degenerate
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self._at_least_one("max_new_tokens")
        if self.loop_tokens < LOOP_REPEATS:
            raise ValueError(f"loop_tokens must be at least {LOOP_REPEATS}, got {self.loop_tokens}")
        check_dtype("dtype", self.dtype)

    def _at_least_one(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass
class AnswersConfig(TextConfig):
    """The greedy answers that accuracy rests on: the same on every machine, so that nobody's speed is asked for here."""

    accuracy_prompts: int = 200
    batch_size: int = 64  # of the accuracy answers
    part_size: int = 256  # accuracy prompts of one file: the unit of work, and the most that a crash can cost
    distributed: bool = field(default=False, metadata=NOT_HASHED)  # accuracy answers by cluster.workers Ray actors, else in this process
    sandbox: SandboxConfig = field(default_factory=SandboxConfig, metadata=NOT_HASHED)  # only whether code may run: asked before anything is decoded

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least_one("accuracy_prompts", "batch_size", "part_size")


@dataclass
class SpeedConfig(TextConfig):
    """What is timed."""

    speed_prompts: int = 32  # the first of the split
    methods: list[Method] = field(default_factory=lambda: [Method.jacobi, Method.mr])  # against greedy AR
    block_sizes: list[int] = field(default_factory=lambda: [16, 32, 64])
    variants: list[DecodingConfig] = field(default_factory=list)  # further settings, each in full: {method: mr, block_size: 64, ngram: true}
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 16])  # prompts timed together; 1 must be among them, equality is checked there
    references: list[Reference] = field(default_factory=lambda: [Reference.transformers, Reference.prompt_lookup])
    prompt_lookup_tokens: int = 10  # that prompt lookup drafts per forward
    speed_part: int = 16  # timed prompts of one file, rounded up to whole batches of every size
    seed: int = 0  # of the random first guesses

    def __post_init__(self) -> None:
        super().__post_init__()
        self.methods, self.references = [Method(m) for m in self.methods], [Reference(r) for r in self.references]
        self._at_least_one("speed_prompts", "speed_part", "prompt_lookup_tokens")
        if 1 not in self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must hold 1 and nothing below it, got {self.batch_sizes}")
        for variant in self.variants:
            for name in _SHARED:
                if getattr(variant, name) != getattr(DecodingConfig, name):
                    raise ValueError(f"variants share {name} with all rows: leave it out of them, or set it beside them")
        settings = self.settings()  # every block size must be usable
        names = [(method_name(s), s.block_size) for s in settings]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"variants repeat what is measured already: {', '.join(f'{m} at block {n}' for m, n in sorted(twice))}")

    def settings(self) -> list[DecodingConfig]:
        """Greedy AR first, then every method at every block size, then the variants."""
        shared = {"max_new_tokens": self.max_new_tokens, "seed": self.seed}
        parallel = [DecodingConfig(method=m, block_size=n, **shared) for m in self.methods if m is not Method.ar for n in self.block_sizes]
        return [DecodingConfig(method=Method.ar, block_size=1, **shared), *parallel, *(replace(v, **shared) for v in self.variants)]


def method_name(setting: DecodingConfig) -> str:
    """What rows call a setting: its method and, in brackets, the knobs that are not as usual: "mr", "mr (K=3, ngram)"."""
    found = turned(setting)
    return setting.method.value + (f" ({', '.join(found)})" if found else "")


def turned(setting: DecodingConfig) -> list[str]:
    """The knobs of a setting that are not as usual, by the paper's letters where it has some."""
    short = {"max_blocks": "K", "spawn_ratio": "r", "verification_size": "v", "pool_size": "pool", "drafts": "drafts"}
    found = [f"{letter}={getattr(setting, name):g}" for name, letter in short.items() if getattr(setting, name) != getattr(DecodingConfig, name)]
    return found + [name for name in ("ngram", "auto") if getattr(setting, name)]


@dataclass
class EvaluateConfig(AnswersConfig, SpeedConfig):
    """Both, and how it is judged."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)  # its limits can change a verdict
