"""Successive halving by wall time: many settings on few prompts, the quickest of them on more. Knows nothing about files.

Every round measures its settings on the same prompts, one prompt after the other, in an order drawn anew each time; a round's figures are its
own, so that nobody is carried on by luck of the round before.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.trajectories.quality import QualityRules
from tasks.artifacts import Prompt
from tasks.evaluate.decoders import Decoder, Timed
from tasks.evaluate.loops import is_degenerate
from tasks.search_decoding.config import KNOBS, carried, crossed, label, unique

log = logging.getLogger(__name__)
REPEATS = 3


@dataclass
class Trial:
    """One contender in one round."""

    name: str
    decoding: dict[str, Any] | None  # None: not one of our decoders
    prompts: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    degenerate: int = 0  # answers that loop, on which every parallel decoder looks fast
    kept: bool = False  # goes on to the next round

    def add(self, timed: Timed) -> None:
        """One more prompt."""
        (answer,) = timed.answers
        self.prompts += 1
        self.tokens += len(answer.tokens)
        self.forwards += len(answer.accepted_lengths)
        self.seconds += timed.seconds
        self.degenerate += is_degenerate(answer.tokens, QualityRules.loop_tokens)

    @property
    def tps(self) -> float:
        return self.tokens / self.seconds

    @property
    def tpf(self) -> float:
        return self.tokens / self.forwards

    @property
    def turned(self) -> int:
        """Knobs that are not as a plain setting has them."""
        plain = carried(DecodingConfig())
        return sum(self.decoding[knob] != plain[knob] for knob in KNOBS) if self.decoding else 0

    def record(self) -> dict[str, Any]:
        return {**vars(self), "tpf": self.tpf, "tps": self.tps}


Answers = dict[tuple[str, int], list[int]]  # (contender, prompt id) -> tokens


def measure(
    contenders: Sequence[tuple[Trial, Decoder]],
    prompts: Sequence[Prompt],
    *,
    seconds: float,
    order: random.Random,
    whole: bool,
    answers: Answers | None = None,
) -> None:
    """Fill the trials, prompt by prompt until that much time has gone; only prompts that every contender has decoded count.

    whole: for the last word: every contender decodes the first prompt whatever it takes, and each prompt REPEATS times, of which the quickest
    counts, since only a disturbance makes one slower. Else of the first prompt, the plainest settings beginning, those who have no turn in time
    get none. answers: filled too.
    """
    start = time.monotonic()
    contenders[0][1](prompts[:1])  # what the first forwards of all cost once
    for number, prompt in enumerate(prompts):
        found: dict[str, Timed] = {}
        for _ in range(REPEATS if whole else 1):
            turns = order.sample(list(contenders), len(contenders))
            if number == 0 and not whole:
                turns.sort(key=lambda turn: turn[0].turned)
            for trial, decoder in turns:
                if decoder.learns and not trial.prompts and trial.name not in found:
                    decoder([prompt])  # its first text is about graphs and latency curves
                timed = decoder([prompt])
                if trial.name not in found or timed.seconds < found[trial.name].seconds:
                    found[trial.name] = timed
                late = time.monotonic() - start >= seconds
                if late and not whole:
                    break
        if number == 0 or len(found) == len(contenders):
            for trial, _ in contenders:
                if trial.name in found:
                    trial.add(found[trial.name])
                    if answers is not None:
                        answers[trial.name, prompt.id] = found[trial.name].answers[0].tokens
        if late:
            break


def search(
    candidates: Sequence[DecodingConfig],
    always: Sequence[DecodingConfig],
    prompts: Sequence[Prompt],
    make: Callable[[DecodingConfig], Decoder],
    *,
    budget_s: float,
    keep_one_in: int,
    finalists: int,
    order: random.Random,
    told: Callable[[int, list[Trial]], None],
) -> list[list[Trial]]:
    """The rounds, each sorted from the quickest on; the last one holds the finalists and `always`, and its first is the winner.

    budget_s: wall time, an equal share for every round: what one has spent beyond its share is taken from those after it.
    told: called after every round, with its number.
    """
    began = time.monotonic()
    rounds: list[list[Trial]] = []
    survivors, waiting, seen = list(candidates), list(candidates), list(candidates)
    count = max(0, math.ceil(math.log(max(len(candidates) / finalists, 1), keep_one_in) - 1e-9)) + 1
    while True:
        final = len(rounds) == count - 1
        field = unique([*survivors, *always]) if final else survivors
        contenders = [(Trial(label(config), carried(config)), make(config)) for config in field]
        measure(contenders, prompts, seconds=(began + budget_s - time.monotonic()) / (count - len(rounds)), order=order, whole=final)
        measured = [(trial, config) for (trial, _), config in zip(contenders, field, strict=True) if trial.prompts]
        ranked = sorted(measured, key=lambda pair: -pair[0].tps)
        rounds.append([trial for trial, _ in ranked])
        if final:
            told(len(rounds), rounds[-1])
            return rounds
        kept = ranked[: max(finalists, -(-len(ranked) // keep_one_in))]
        for trial, _ in kept:
            trial.kept = True
        told(len(rounds), rounds[-1])
        survivors = [config for _, config in kept]
        if len(rounds) == count - 1:
            survivors = survivors[:finalists]
            continue
        # combinations of survivors, and their variants that had no turn yet, get a round to prove themselves before the finals
        waiting = [config for config in waiting if config not in [c for _, c in measured]]
        kinds = [(config.method, config.block_size) for config in survivors]
        variants = sorted((c for c in waiting if (c.method, c.block_size) in kinds), key=lambda c: kinds.index((c.method, c.block_size)))
        new = unique([c for c in crossed(survivors) if c not in seen] + variants)[: len(survivors)]
        seen += new
        survivors += new
