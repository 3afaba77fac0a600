"""A command line or experiment file that Hydra refuses: every mistake in it, where Hydra tells the first.

Each override is tried on top of those that were good, each value of a file by itself. Only done once composing has failed: it takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines.config import schema
from pipelines.config.sections import Sections
from pipelines.errors import config_error, named_nearest
from tasks.stage import UserError

GROUP = re.compile(r"(experiment|cluster)$|hydra[./]")  # what names files: composed before any value
REFUSED = (HydraException, OmegaConfBaseException)


def composing_mistakes(argv: Sequence[str], error: HydraException | OmegaConfBaseException) -> list[str]:
    """Every mistake in these arguments of `full_run`, one line each. error: what Hydra has raised; alone where no more is found."""
    arguments = get_args_parser().parse_args(list(argv))
    own = [f"hydra.searchpath=[file://{Path(arguments.config_dir).resolve()}]"] if arguments.config_dir else []
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        return list(_mistakes([*own, *arguments.overrides])) or [config_error(error)]


def _mistakes(overrides: Sequence[str]) -> Iterator[str]:
    groups, values = [], []
    told: list[str] = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            message = config_error(_refusal([text]) or error)
            told.append(message if text in message else f"{text}: {message}")  # the parser may name only what it had expected
            continue
        (groups if GROUP.match(override.key_or_group) else values).append(_single(override, text))
    if error := _refusal([text for _, text in groups]):
        yield from told
        yield from _in_files([o for o, _ in groups]) or [config_error(error)]  # what it would have set decides what else is right
        return
    good = [text for _, text in groups]
    for override, text in values:
        if error := _refusal([*good, text]):
            told += _in_value(override) or [config_error(error)]
        else:
            good.append(text)
    yield from told
    try:
        schema.build(compose("config", good))
    except UserError as error:
        missing = {name for line in told for name in named_nearest(line)}  # were probably meant, so their defaults prove nothing
        yield from (line for line in str(error).splitlines() if not any(name in line for name in missing))
    except OmegaConfBaseException as error:
        yield config_error(error)


def _single(override: Override, text: str) -> tuple[Override, str]:
    """Of a sweep, its first job."""
    if not override.is_sweep_override():
        return override, text
    first = next(iter(override.sweep_string_iterator()))
    single = f"{override.get_key_element()}={first}"
    return OverridesParser.create().parse_override(single), single


def _refusal(overrides: list[str]) -> HydraException | OmegaConfBaseException | None:
    try:
        compose("config", overrides)
    except REFUSED as error:
        return error
    return None


def _in_files(groups: Sequence[Override]) -> list[str]:
    """Of the files that experiment and cluster name, and those they rest on."""
    searched = [o.input_line for o in groups if o.key_or_group == "hydra.searchpath"]
    found = []
    for override in groups:
        group, name = override.key_or_group, override.value()
        if group not in ("experiment", "cluster"):
            continue
        try:
            plain = OmegaConf.to_container(compose(overrides=[*searched, f"+{group}={name}"]), resolve=False)
        except REFUSED:  # no such file, or none that can be read
            continue
        plain.pop("hydra", None)
        found += [f"{group}={name}: {message}" for message in value_mistakes(plain)]
    return found


def _in_value(override: Override) -> list[str]:
    value = override.value()
    if not isinstance(value, dict | list) or override.is_delete():
        return []
    plain: Any = OmegaConf.to_container(OmegaConf.create(value), resolve=False)
    for key in reversed(override.key_or_group.split(".")):
        plain = {key: plain}
    return value_mistakes(plain)


def value_mistakes(plain: dict[str, Any]) -> list[str]:
    """Unknown names and values of a wrong kind, wherever they stand in it; then what its sections say of the rest."""
    known, found = OmegaConf.structured(schema.PipelineConfig), []
    wrong = {name: value for name, value in plain.items() if _error(known, {name: value})}  # a merge takes its time, and most sections are right
    places = set()
    for path, leaf in _leaves(wrong):
        if error := _error(known, leaf):
            places.add(tuple(path))
            found.append(config_error(error, inside=".".join(path)))
    rest = _without(plain, places)
    if not _error(known, rest):
        sections = Sections(OmegaConf.merge(known, rest))
        for name in rest:
            sections.read(name)
        meant = {name for line in found for name in named_nearest(line)} | {".".join(path) for path in places}  # empty for no fault of theirs
        found += [line for line in sections.mistakes if not any(name in line for name in meant)]
    return list(dict.fromkeys(found))


def _without(value: Any, places: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> Any:
    """The value without what stands at these places, and without groups that held nothing else; entries of a list keep theirs."""
    if isinstance(value, dict):
        kept = {key: _without(inner, places, (*path, str(key))) for key, inner in value.items() if (*path, str(key)) not in places}
        return {key: inner for key, inner in kept.items() if inner != {} or value[key] == {}}
    if isinstance(value, list):
        return [{} if (*path, str(i)) in places else _without(inner, places, (*path, str(i))) for i, inner in enumerate(value)]
    return value


def _error(known: DictConfig, given: dict[str, Any]) -> OmegaConfBaseException | None:
    try:
        OmegaConf.merge(known, given)
    except OmegaConfBaseException as error:
        return error
    return None


def _leaves(value: Any) -> Iterator[tuple[list[str], Any]]:
    """`value` once per value in it, holding that one alone, with the way to it; entries of a list keep their places."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from (([str(key), *path], {key: leaf}) for path, leaf in _leaves(inner))
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for position, entry in enumerate(value):
            yield from (([str(position), *path], [*({} for _ in range(position)), leaf]) for path, leaf in _leaves(entry))
    else:
        yield [], value
