"""Fitting a run to how long the model's answers are: block sizes, windows, caps, row length, budget. Pure arithmetic; docs/recipes.md gives reasons.

    cap        the 95th percentile of the measured answers and a quarter more, in steps of 32, as far as the model's context reaches
    blocks     16 and then 32, as in the paper; halved until the median answer has at least four blocks of the first round's (two of the second's)
    windows    16 and then 8, as in the paper, but never longer than the median answer in blocks: a longer one never shows high noise.
               Where the first round's would be, i.e. below 16 blocks: window 1 and the random schedule, which learnt several times faster
    rows       the longest prompt and twice the cap, so that no sample is left out
    budget     passes over the data, up to three, until train_tokens packed tokens have been seen in all rounds

Whatever the user has set himself stays as it is, and the rest is fitted around it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelines.estimate.model import find_shape
from tasks.measure_answers import MeasureAnswersConfig

if TYPE_CHECKING:
    from pipelines.config.schema import PipelineConfig

STAGE = "answer_lengths"
BLOCKS, WINDOWS = (16, 32), (16, 8)  # the paper's, by round
LEAST_BLOCK, SHORT = 4, WINDOWS[0]  # tokens; blocks of the median answer below which window 1 is taken
CAP_STEP, CAP_SHARE, CAP_SPARE = 32, 0.95, 1.25
MOST_EPOCHS = 3.0
ASSUMED_ANSWER = 256  # tokens, where nothing has been measured yet
DECODED = (16, 32, 64, 128)  # block sizes that are timed, those that an answer fills


@dataclass
class FitConfig:
    """Raises ValueError naming the field for a value that cannot be used."""

    enabled: bool = False  # measure answers first, and fit what was not set to them
    train_tokens: float = 10e6  # packed tokens that all rounds together should see; 0.1 million taught a 135 M model next to nothing
    answers: MeasureAnswersConfig = field(default_factory=MeasureAnswersConfig)

    def __post_init__(self) -> None:
        if self.train_tokens <= 0:
            raise ValueError(f"train_tokens must be above 0, got {self.train_tokens}")


@dataclass(frozen=True)
class Lengths:
    """What was measured, or is assumed where nothing was."""

    answers: Sequence[float]  # tokens of each
    longest_prompt: int
    mean_prompt: float
    train: float | None  # training prompts, where it is known
    context: int | None = None  # tokens that the model holds
    measured: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.answers)


@dataclass(frozen=True)
class Fitted:
    """One setting: its name as overrides give it, its value, and why; set_by_user: kept as it was."""

    name: str
    value: Any
    why: str
    set_by_user: bool = False


# what is fitted: a mistake that names one of these is told after fitting, not before
NAMES = (
    *("trajectories.max_new_tokens", "evaluate.max_new_tokens", "distill.probe.max_new_tokens", "rounds", "noise_schedule"),
    *("evaluate.block_sizes", "distill.probe.block_size", "pack.max_length", "distill.epochs"),
)


def concerns(message: str) -> bool:
    """Whether a mistake rests on something that will be fitted."""
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message) for name in NAMES)


def fitted(config: PipelineConfig, lengths: Lengths, *, given: Collection[str]) -> tuple[PipelineConfig, list[Fitted]]:
    """The config with its open settings filled in. given: what the user has set, as overrides name it ("rounds.0.window")."""
    told: list[Fitted] = []

    def choose(name: str, value: Any, now: Any, why: str) -> Any:
        kept = any(g == name or name.startswith(f"{g}.") for g in given)
        told.append(Fitted(name, now if kept else value, "set by you" if kept else why, kept))
        return now if kept else value

    # 1. how long an answer may be
    cap = choose("trajectories.max_new_tokens", _cap(config, lengths), config.trajectories.max_new_tokens, _quantile_said(lengths))
    evaluated = choose("evaluate.max_new_tokens", cap, config.evaluate.max_new_tokens, "as the trajectories")
    probed = choose("distill.probe.max_new_tokens", min(cap, 128), config.distill.probe.max_new_tokens, "as the trajectories, at most 128")

    # 2. rounds: blocks, then windows for them
    rounds, median = config.rounds, min(lengths.median, cap)
    if "rounds" in given:
        told.append(Fitted("rounds", f"{len(rounds)} of yours", "set by you", set_by_user=True))
    else:
        rounds, size = [], 0
        for number in range(len(BLOCKS)):
            now = config.rounds[number] if number < len(config.rounds) else dataclasses.replace(config.rounds[-1])
            where = f"rounds.{number}"
            size = choose(f"{where}.block_size", _block(number, median), now.block_size, f"the median answer has {median:g} tokens")
            blocks = max(1, int(median // size))
            short = median / (rounds[0].block_size if rounds else size) < SHORT
            window = 1 if short else min(WINDOWS[number], blocks)
            why = f"fewer than {SHORT} blocks of round 1 in the median answer" if short else f"the median answer has {blocks} blocks"
            rounds.append(dataclasses.replace(now, block_size=size, window=choose(f"{where}.window", window, now.window, why)))
    kind = config.noise_schedule
    if all(r.window == 1 for r in rounds):
        kind = choose("noise_schedule", "random", kind, "at window 1 a linear schedule has one noise ratio only")
    sizes = [n for n in DECODED if n <= max(cap, DECODED[0])]
    sizes = choose("evaluate.block_sizes", sizes, config.evaluate.block_sizes, "those that an answer fills")
    probe_block = choose("distill.probe.block_size", min(32, cap), config.distill.probe.block_size, "as the second round's, or the whole answer")

    # 3. rows and budget
    row = -(-(lengths.longest_prompt + 2 * cap) // 64) * 64
    row = choose("pack.max_length", row, config.pack.max_length, f"the longest prompt ({lengths.longest_prompt}) and twice the cap")
    epochs = choose("distill.epochs", *_epochs(config, lengths, len(rounds)))

    probe = dataclasses.replace(config.distill.probe, max_new_tokens=probed, block_size=probe_block)
    return dataclasses.replace(
        config,
        noise_schedule=kind,
        rounds=rounds,
        trajectories=dataclasses.replace(config.trajectories, max_new_tokens=cap),
        pack=dataclasses.replace(config.pack, max_length=row),
        distill=dataclasses.replace(config.distill, epochs=epochs, probe=probe),
        evaluate=dataclasses.replace(config.evaluate, max_new_tokens=evaluated, block_sizes=sizes),
    ), told


def _cap(config: PipelineConfig, lengths: Lengths) -> int:
    ordered = sorted(lengths.answers)
    most = ordered[math.ceil(CAP_SHARE * len(ordered)) - 1] * CAP_SPARE
    cap = math.ceil(most / CAP_STEP) * CAP_STEP
    if lengths.context is not None:
        cap = min(cap, lengths.context - max(lengths.longest_prompt, config.data.max_prompt_tokens))
    return max(1, cap)


def _quantile_said(lengths: Lengths) -> str:
    kind = "measured" if lengths.measured else "assumed"
    return f"{len(lengths.answers)} {kind} answers of {min(lengths.answers):g} to {max(lengths.answers):g} tokens"


def _block(number: int, median: float) -> int:
    size, least = BLOCKS[number], (4, 2)[number]
    while size > LEAST_BLOCK and median < least * size:
        size //= 2
    return size


def _epochs(config: PipelineConfig, lengths: Lengths, rounds: int) -> tuple[float, float, str]:
    """Value, what the config has, and why."""
    now = config.distill.epochs
    train = lengths.train
    if config.trajectories.prompts is not None:
        train = min(config.trajectories.prompts, train or config.trajectories.prompts)
    if not train:
        return now, now, "the number of prompts is not known yet"
    once = train * (lengths.mean_prompt + 2 * statistics.fmean(lengths.answers)) * rounds
    epochs = min(MOST_EPOCHS, max(1.0, math.ceil(config.fit.train_tokens / once)))
    few = "; few: expect little" if epochs * once < config.fit.train_tokens / 10 else ""
    return epochs, now, f"{train:g} prompts are {once / 1e6:.2g} million packed tokens in {rounds} rounds{few}"


def said(told: Sequence[Fitted]) -> str:
    """One line per setting."""
    width = max(len(f.name) for f in told)
    return "\n".join(f"  {f.name:<{width}}  {f.value!s:<18} {f.why}" for f in told)


def given_names(overrides: Sequence[str], config: PipelineConfig, plain: PipelineConfig) -> set[str]:
    """What was set: overrides by name, and, by whatever file, every setting that is fitted and differs from the schema's default (`plain`)."""
    names = {override.lstrip("+").partition("=")[0] for override in overrides if "=" in override}
    for name in NAMES:
        ours, default = config, plain
        for part in name.split("."):
            ours, default = getattr(ours, part), getattr(default, part)
        if ours != default and not any(other.startswith(f"{name}.") for other in names):
            names.add(name)
    return names


def read_lengths(found: Mapping[str, Any], prompts: Mapping[str, float]) -> Lengths:
    """found: answer_lengths.json. prompts: metrics of the prompts stage."""
    return Lengths(
        answers=found["answer_tokens"],
        longest_prompt=int(prompts["prompt_tokens_max"]),
        mean_prompt=prompts["prompt_tokens_mean"],
        train=prompts["train"],
        context=found["context"],
    )


def assumed_prompt(config: PipelineConfig) -> float:
    """Tokens of a mean prompt, where nothing is declared or measured."""
    return config.data.max_prompt_tokens / 4


def assumed_lengths(config: PipelineConfig, train: float | None) -> Lengths:
    """Where nothing has been measured yet."""
    answer = config.estimate.answer_tokens or ASSUMED_ANSWER
    shape = find_shape(config.model.path) if config.model.path else None
    return Lengths(
        answers=[answer],
        longest_prompt=config.data.max_prompt_tokens,
        mean_prompt=config.estimate.prompt_tokens or assumed_prompt(config),
        train=train,
        context=(shape.context or None) if shape else None,
        measured=False,
    )
