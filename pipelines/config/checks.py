"""What no single section of a config can know: one function per rule, each of which yields every mistake it finds, with the fix.

A message names, as overrides name them, all the fields it rests on: `schema.build` leaves out what rests on a field that is wrong itself.
Free of torch and ray, and quick: all of it is asked at every start. What only a cluster can tell is in tasks/cluster_checks.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jacobi_core.decoding.config import Method
from jacobi_core.decoding.context import stated_context
from jacobi_core.distillation.noise_schedule import NoiseSchedule, ScheduleError, check_kind
from tasks.base_model.model_source import resolve_source
from tasks.cluster import in_working_dir, worker_mistakes
from tasks.distill.data import check_divides
from tasks.generate_trajectories.config import Collect
from tasks.pack_sequences import TooLong
from tasks.prepare_prompts.config import CODE, GENERATED, MINICODE, SPLITS, PreparePromptsConfig, Source
from tasks.stage import UserError

if TYPE_CHECKING:
    from pipelines.config.schema import PipelineConfig


def mistakes(config: PipelineConfig) -> Iterator[str]:
    """All that is wrong, in the order of the method's steps. Each section has passed its own checks."""
    for rule in RULES:
        yield from rule(config)


def enough_rounds(config: PipelineConfig) -> Iterator[str]:
    if not config.rounds:
        yield "rounds: at least one round is needed"


def known_schedule(config: PipelineConfig) -> Iterator[str]:
    try:
        check_kind(config.noise_schedule)
    except ScheduleError as error:
        yield str(error)


def shape_of_a_round(config: PipelineConfig) -> Iterator[str]:
    """t_min and t_max of a round together with those that all rounds share."""
    for round_ in config.rounds:
        given = {name: getattr(round_, name) for name in ("t_min", "t_max") if getattr(round_, name) is not None}
        try:
            NoiseSchedule(**{**vars(config.schedule), **given})
        except ValueError as error:
            yield f"rounds: {error}"


def one_schedule_for_all(config: PipelineConfig) -> Iterator[str]:
    if config.trajectories.collect is Collect.schedule and "cllm" in config.baselines:
        yield "trajectories.collect=schedule keeps no states for another schedule, and baselines=[cllm] has one of its own; use collect=all"


def existing_splits(config: PipelineConfig) -> Iterator[str]:
    splits = {"evaluate.split": config.evaluate.split}
    if config.tune:
        splits |= {"search.split": config.search.split, "search.heldout_split": config.search.heldout_split}
    for setting, split in splits.items():
        if split not in SPLITS:
            yield f"{setting}={split}: there is no such split; choose one of {', '.join(SPLITS)}"
        elif getattr(config.data, split) == 0 and not (split == "train" and config.data.source in GENERATED):  # told by prompt_source
            what = "evaluate" if setting == "evaluate.split" else "measure"
            yield f"data.{split}=0 leaves nothing to {what} on; raise it or choose another {setting}"


def prompt_source(config: PipelineConfig) -> Iterator[str]:
    try:
        PreparePromptsConfig(**vars(config.data))
    except ValueError as error:
        yield str(error)


def benchmarks_beside_the_data(config: PipelineConfig) -> Iterator[str]:
    for number, benchmark in enumerate(config.evaluate.benchmarks):
        if benchmark.name.value == config.data.problem_set:
            setting = f"evaluate.benchmarks.{number}.name={benchmark.name.value}"
            yield f"{setting}: the prompts of data are called that too, and are evaluated already; leave it out"


def code_may_run(config: PipelineConfig) -> Iterator[str]:
    code = next((f"{setting}={source.value}" for setting, source in _evaluated(config) if source in CODE), None)
    if code and not config.evaluate.sandbox.allow_code_execution:
        yield (
            f"evaluate.sandbox.allow_code_execution is false, and {code} is scored by running generated code; set it to true to run it in the sandbox"
        )


def _evaluated(config: PipelineConfig) -> Iterator[tuple[str, Source]]:
    """Setting, and the problems it names."""
    yield "data.source", config.data.source
    yield from ((f"evaluate.benchmarks.{number}.name", benchmark.name) for number, benchmark in enumerate(config.evaluate.benchmarks))


def base_model(config: PipelineConfig) -> Iterator[str]:
    if config.model.path is None:
        if config.data.source not in MINICODE:
            yield "model.path is missing: only data.source=minicode can pretrain its own base; name a folder, hub id or GGUF file"
        return
    try:
        resolve_source(config.model.path)
    except UserError as error:
        yield str(error)


def optional_packages(config: PipelineConfig) -> Iterator[str]:
    """What is imported hours later."""
    if config.distill.lora.rank and importlib.util.find_spec("peft") is None:
        yield f"distill.lora.rank={config.distill.lora.rank} needs the package peft: pip install 'jacobi-forcing[lora]', or set it to 0"
    judged = next((setting for setting, source in _evaluated(config) if source is Source.math500), None)
    if judged and importlib.util.find_spec("math_verify") is None:
        yield f"{judged}=math500 needs the package math-verify to judge answers: pip install 'jacobi-forcing[eval]'"


def blocks_of_an_answer(config: PipelineConfig) -> Iterator[str]:
    """A block no answer fills is never trained on whole; a window no answer fills never reaches its last noise ratio."""
    longest = config.trajectories.max_new_tokens
    for number, round_ in enumerate(config.rounds):
        where, size, blocks = f"rounds.{number}", round_.block_size, -(-longest // round_.block_size)
        if size > longest:
            yield f"{where}.block_size={size} is longer than any answer (trajectories.max_new_tokens={longest}): lower it, or raise the other"
        elif round_.window > blocks:
            yield (
                f"{where}.window={round_.window} is more than the {blocks} blocks of {where}.block_size={size} in the longest answer "
                f"(trajectories.max_new_tokens={longest}): set it to {blocks} or less, or raise trajectories.max_new_tokens"
            )


def rows_hold_an_answer(config: PipelineConfig) -> Iterator[str]:
    """A sample is its prompt and twice its answer (noisy and clean); a piece of a split one, the prompt, all clean text and one noisy window."""
    answer, room = config.trajectories.max_new_tokens, config.pack.max_length
    if config.pack.too_long is TooLong.drop:
        if 2 * answer > room:
            yield (
                f"pack.max_length={room}: an answer of trajectories.max_new_tokens={answer} takes twice its tokens in a row, {2 * answer} and its "
                f"prompt, and pack.too_long=drop leaves out what does not fit: raise it to {2 * answer + config.data.max_prompt_tokens} "
                f"(data.max_prompt_tokens={config.data.max_prompt_tokens} with it), or set pack.too_long=split"
            )
        return
    window = max((min(r.window * r.block_size, answer) for r in config.rounds), default=0)
    if answer + window > room:
        yield (
            f"pack.max_length={room}: the last piece of an answer of trajectories.max_new_tokens={answer} takes {answer + window} tokens, all text "
            f"before it and one noisy window of rounds, and its prompt: raise it to {answer + window + config.data.max_prompt_tokens} "
            f"(data.max_prompt_tokens={config.data.max_prompt_tokens} with it)"
        )


def rows_for_one_step(config: PipelineConfig) -> Iterator[str]:
    """Without splitting there are at most as many rows as prompts."""
    if config.pack.too_long is TooLong.split:
        return
    size = config.distill.batch_size
    for number, round_ in enumerate(config.rounds):
        counts = {"data.train": config.data.train, "trajectories.prompts": config.trajectories.prompts}
        if round_.prompts is not None:  # in place of what all rounds share
            counts["trajectories.prompts"] = None
            counts[f"rounds.{number}.prompts"] = round_.prompts
        given = {name: count for name, count in counts.items() if count}
        fewest = min(given, key=given.__getitem__, default=None)
        if fewest is not None and given[fewest] < size:
            yield f"distill.batch_size={size} rows make one step, and {fewest}={given[fewest]} prompts give no more rows than that: lower the first"
            return  # of one setting one message


def places_outlive_the_job(config: PipelineConfig) -> Iterator[str]:
    """A job sent with `ray job submit --working-dir` starts in a copy of that folder, one per node, which Ray deletes."""
    if not in_working_dir():
        return
    for field in dataclasses.fields(config.paths):
        place = getattr(config.paths, field.name)
        if place is not None and "://" not in place and not Path(place).expanduser().is_absolute():
            yield f"paths.{field.name}={place}: a job's working directory is a copy that Ray deletes; give an absolute path that all nodes see"


def workers_place(config: PipelineConfig) -> Iterator[str]:
    yield from worker_mistakes(config.cluster)


def batch_divides(config: PipelineConfig) -> Iterator[str]:
    if config.cluster.ranks < 1:  # told by workers_place
        return
    try:
        check_divides(config.distill, config.cluster.ranks)
    except UserError as error:
        yield str(error)


def lengths_fit_the_model(config: PipelineConfig) -> Iterator[str]:
    limit = context_length(config)
    if limit is None:
        return
    source = (
        f"model.pretrain.max_positions={limit}"
        if config.model.path is None
        else f"{limit}, max_position_embeddings of model.path's config.json, scaled positions counted"
    )
    longest = config.data.max_prompt_tokens
    capped = {"trajectories": config.trajectories, "evaluate": config.evaluate, **({"search": config.search} if config.tune else {})}
    for section, settings in capped.items():
        answer = settings.max_new_tokens
        if longest + answer > limit:
            least = f"set it to {limit - longest} or less, or lower" if longest < limit else "lower it and" if answer >= limit else "lower"
            yield (
                f"{section}.max_new_tokens={answer}: with a prompt of data.max_prompt_tokens={longest} that is {longest + answer} tokens, "
                f"more than the model holds ({source}): {least} data.max_prompt_tokens"
            )
    for number, benchmark in enumerate(config.evaluate.benchmarks):  # no prompt of these is cut or left out, so only what is sure is told
        if benchmark.max_new_tokens is not None and benchmark.max_new_tokens >= limit:
            setting = f"evaluate.benchmarks.{number}.max_new_tokens={benchmark.max_new_tokens}"
            yield f"{setting} leaves no room for a prompt (the model holds {source}): lower it"
    if config.distill.probe.every and config.distill.probe.max_new_tokens >= limit:  # the probe takes the prompts that fit
        yield f"distill.probe.max_new_tokens={config.distill.probe.max_new_tokens} leaves no room for a prompt (the model holds {source}): lower it"


def blocks_fit_the_model(config: PipelineConfig) -> Iterator[str]:
    limit = context_length(config)
    sizes = {f"rounds.{i}.block_size": [r.block_size] for i, r in enumerate(config.rounds)}
    sizes |= {"evaluate.block_sizes": config.evaluate.block_sizes, "distill.probe.block_size": [config.distill.probe.block_size]}
    sizes["evaluate.variants: block_size"] = [v.block_size for v in config.evaluate.variants]
    for setting, found in sizes.items():
        if limit is not None and max(found, default=0) > limit:
            yield f"{setting}={max(found)} is longer than the model's context ({limit} tokens; model.path or model.pretrain.max_positions): lower it"


def blocks_within_the_budget(config: PipelineConfig) -> Iterator[str]:
    """One block size above the answers shows that longer is no faster; where all are, nothing is measured."""
    cap = {"evaluate": config.evaluate, **({"search": config.search} if config.tune else {})}
    for section, settings in cap.items():
        parallel = [m for m in settings.methods if m is not Method.ar]
        if parallel and settings.block_sizes and min(settings.block_sizes) > settings.max_new_tokens:
            yield (
                f"{section}.block_sizes={settings.block_sizes}: every one is longer than the answers ({section}.max_new_tokens="
                f"{settings.max_new_tokens}): add a smaller one"
            )


def context_length(config: PipelineConfig) -> int | None:
    """Most tokens of a text, as the checkpoint says, without loading it; None where that cannot be known here (a GGUF file, not downloaded)."""
    if config.model.path is None:
        return config.model.pretrain.max_positions
    try:
        source = resolve_source(config.model.path)
    except UserError:
        return None
    if source.gguf_file:
        return None
    file = Path(source.location, "config.json")
    if source.hub:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source.location, "config.json")
        if not isinstance(found, str):
            return None
        file = Path(found)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # told by the stage that loads it
        return None
    return stated_context(settings.get("text_config") or settings)


RULES: tuple[Callable[[PipelineConfig], Iterator[str]], ...] = (
    enough_rounds,
    known_schedule,
    shape_of_a_round,
    one_schedule_for_all,
    prompt_source,
    existing_splits,
    benchmarks_beside_the_data,
    code_may_run,
    base_model,
    optional_packages,
    places_outlive_the_job,
    workers_place,
    batch_divides,
    blocks_of_an_answer,
    rows_hold_an_answer,
    rows_for_one_step,
    lengths_fit_the_model,
    blocks_fit_the_model,
    blocks_within_the_budget,
)
