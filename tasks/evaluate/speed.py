"""Timing decoders side by side in one process: they take turns prompt by prompt, each time another one first. Writes a file per part.

A part is a few prompts under all settings, so that what a restart finds is complete, and every ratio is of times taken together.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jacobi_core.decoding.equivalence import compare_with_ar
from jacobi_core.decoding.tokens import TokenRules
from tasks.artifacts import Prompt
from tasks.completion_files import Completion, part_file, read_metadata, write_completions
from tasks.evaluate.config import Reference, SpeedConfig
from tasks.evaluate.decoders import Decoder, OurDecoder, StaticForwards, Timed, TransformersDecoder, neutral
from tasks.evaluate.loops import is_degenerate

log = logging.getLogger(__name__)
WARM_UP = 2  # prompts decoded before the clock counts


def part_prompts(config: SpeedConfig) -> int:
    """Prompts of one part: whole batches of every size."""
    step = math.lcm(*config.batch_sizes)
    return -(-config.speed_part // step) * step


def missing(config: SpeedConfig, count: int, output: Path, machine: Mapping[str, Any]) -> list[int]:
    """Parts of so many prompts that are not there, or were timed on another machine: its times are no answer to this one's."""
    parts = range(-(-count // part_prompts(config)))
    files = [part_file(output, "speed", i) for i in parts]
    return [i for i, file in zip(parts, files, strict=True) if not file.exists() or read_metadata(file)["machine"] != machine]


def decode_parts(
    config: SpeedConfig,
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase, TokenRules],
    prompts: Sequence[Prompt],
    parts: Sequence[int],
    output: Path,
    machine: Mapping[str, Any],
) -> None:
    """Decode and time these parts of `speed-*.parquet`. machine: kept beside the times."""
    model, tokenizer, rules = loaded
    size = part_prompts(config)
    neutral(model, rules)
    capacity = max(len(p.input_ids) for p in prompts) + config.max_new_tokens
    decoders = make_decoders(config, model, rules, StaticForwards(model, capacity=capacity))
    warm_up(decoders, prompts)
    told = time.monotonic()
    for number in parts:
        part, found = prompts[number * size : (number + 1) * size], []
        for first, group, decoder, timed in take_turns(decoders, part, start=number * size):
            for prompt, answer in zip(group, timed.answers, strict=True):
                found.append(
                    Completion(
                        id=prompt.id,
                        method=decoder.method,
                        block_size=decoder.block_size,
                        batch_size=decoder.batch_size,
                        batch=first // decoder.batch_size,
                        prompt_tokens=len(prompt.input_ids),
                        tokens=answer.tokens,
                        text=tokenizer.decode(answer.tokens, skip_special_tokens=True),
                        stop_reason=answer.stop_reason,
                        forwards=len(answer.accepted_lengths),
                        accepted_lengths=answer.accepted_lengths,
                        seconds=timed.seconds / len(group),
                        prefill_seconds=timed.prefill_seconds / len(group),
                        degenerate=is_degenerate(answer.tokens, config.loop_tokens),
                    )
                )
            if time.monotonic() - told > 10:
                told = time.monotonic()
                log.info("evaluate: speed %d/%d prompts", first, len(prompts))
        _compare(model, part, found)
        write_completions(part_file(output, "speed", number), found, metadata={"machine": machine})


def make_decoders(config: SpeedConfig, model: PreTrainedModel, rules: TokenRules, forwards: StaticForwards) -> list[Decoder]:
    """Batch size by batch size: greedy AR, every method at every block size, then the references."""
    decoders: list[Decoder] = []
    for size in config.batch_sizes:
        decoders += [OurDecoder(model, rules, setting, batch_size=size, forwards=forwards) for setting in config.settings()]
        for reference in config.references:
            if size == 1 or reference is not Reference.prompt_lookup:
                more = {"max_new_tokens": config.max_new_tokens, "lookup": config.prompt_lookup_tokens}
                decoders.append(TransformersDecoder(model, rules, reference, batch_size=size, **more))
    return decoders


def warm_up(decoders: Sequence[Decoder], prompts: Sequence[Prompt]) -> None:
    """Spend what first forwards cost once: kernels, graphs, buffers."""
    for prompt in prompts[:WARM_UP]:
        for decoder in decoders:
            if decoder.batch_size == 1:
                decoder([prompt])
    for decoder in decoders:
        if decoder.batch_size > 1:
            decoder(prompts[: decoder.batch_size])


def take_turns(decoders: Sequence[Decoder], prompts: Sequence[Prompt], *, start: int = 0) -> Iterator[tuple[int, Sequence[Prompt], Decoder, Timed]]:
    """Yields (number of the group's first prompt, group, decoder, times), batch size by batch size, one group of prompts after the other;
    nobody always goes first. start: number of the first prompt."""
    for size in dict.fromkeys(d.batch_size for d in decoders):
        equals = [d for d in decoders if d.batch_size == size]
        for at in range(0, len(prompts), size):
            group, turn = prompts[at : at + size], (start + at) // size % len(equals)
            for decoder in equals[turn:] + equals[:turn]:
                yield start + at, group, decoder, decoder(group)


def _compare(model: PreTrainedModel, prompts: Sequence[Prompt], found: Sequence[Completion]) -> None:
    """Note where an answer leaves that of greedy AR, decoded alone."""
    ids = {p.id: p.input_ids for p in prompts}
    ar = {c.id: torch.tensor(c.tokens) for c in found if c.setting == ("ar", 1, 1)}
    for completion in found:
        difference = compare_with_ar(model, torch.tensor(ids[completion.id]), ar[completion.id], torch.tensor(completion.tokens))
        if difference is not None:
            completion.first_difference, completion.margin = difference.first_index, difference.margin
            completion.difference = difference.kind
