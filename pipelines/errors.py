"""From an exception to the one line a user reads: config mistakes, and what a stage raised, on whichever worker.

Imports neither ray nor torch: Ray's wrappers are known by their attributes and by the traceback they carry as text.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from tasks.stage import UserError

USER_ERROR = re.compile(rf"^(?:[\w.]+\.)?{UserError.__name__}: (.+)$", re.MULTILINE)
REMOTE_ERROR = re.compile(r"^[\w.]*(?:Error|Exception)\b.*$", re.MULTILINE)  # the first in a chain is what went wrong, the others wrap it


def config_error(error: HydraException | OmegaConfBaseException, *, inside: str = "") -> str:
    """Where the mistake is and, for an unknown name, which known ones are near.

    inside: the value that was being set, where that is known; below a list OmegaConf names only the end of it.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return f"{str(error.missing_cfg_file).replace('/', '=', 1)}: no such config; available: {', '.join(error.options or [])}"
    cause: BaseException = error
    while isinstance(cause.__cause__, HydraException | OmegaConfBaseException):
        cause = cause.__cause__
    if not isinstance(cause, OmegaConfBaseException):  # a mistake in the override's grammar
        lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("See https")]
        return ": ".join(lines[:2])
    key = re.sub(r"\[(\w+)\]", r".\1", cause.full_key or str(cause.key or "config")).lstrip(".")
    key = _completed(key, inside)
    message = str(cause).splitlines()[0]
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(cause.object_type):
        return f"{key}: no such setting; {_nearest(key, cause.object_type)}"
    if message.startswith("Invalid type assigned") and key.rpartition(".")[2].isdecimal():
        return f"{key}: there is no such entry to change; give the list as a whole, as in 'rounds=[{{block_size: 16, window: 4}}]'"
    if message.startswith("Invalid type assigned"):
        inside = [name for name in known_settings() if name.startswith(f"{key}.")]
        return f"{key}: is a group of settings, not one value; set one of them: {', '.join(inside[:3])}, ..."
    return f"{key}: {message}"


def user_error(error: BaseException) -> str | None:
    """The message of the UserError in `error`, also where Ray wrapped it (its own text is then a traceback); None where there is none."""
    if isinstance(error, UserError) and "\n" not in str(error):
        return str(error)
    failures = getattr(error, "worker_failures", None) or {}  # of Ray Train: rank -> what it raised
    found = USER_ERROR.findall("\n".join(map(str, [error, *failures.values()])))
    return found[-1] if found else None


def summary(error: BaseException) -> str:
    """Type and first line of any other exception; of one that carries a worker's traceback as text, those of the first that traceback names."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        return summary(next(iter(failures.values())))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    remote = REMOTE_ERROR.search(str(error)) if any(line.startswith('File "') for line in lines) else None
    return remote[0] if remote else f"{type(error).__name__}: {lines[0]}"


def _nearest(key: str, group: type) -> str:
    parent, _, name = key.rpartition(".")
    here = [f.name for f in dataclasses.fields(group)]
    near = [f"{parent}.{found}".lstrip(".") for found in difflib.get_close_matches(name, here, n=3)]
    near += [known for known in known_settings() if known.rpartition(".")[2] == name]
    return f"nearest: {', '.join(near)}" if near else f"known here: {', '.join(here)}"


def _completed(key: str, inside: str) -> str:
    """The shortest beginning of `inside` that ends in `key`; `key` itself where there is none."""
    parts = inside.split(".")
    beginnings = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((whole for whole in beginnings if f".{whole}".endswith(f".{key}")), key)


def named_nearest(message: str) -> list[str]:
    """The settings that a message of `config_error` proposes."""
    return message.partition("; nearest: ")[2].split(", ") if "; nearest: " in message else []


def known_settings() -> Iterator[str]:
    """Every setting there is, as an override names it."""
    from pipelines.config.schema import PipelineConfig  # which tells its mistakes through this module

    return _names(PipelineConfig)


def _names(group: type, prefix: str = "") -> Iterator[str]:
    """Every setting below a dataclass as an override names it; of a list, its first entry."""
    for name, kind in typing.get_type_hints(group).items():
        entry = next((a for a in typing.get_args(kind) if dataclasses.is_dataclass(a)), None)
        if dataclasses.is_dataclass(kind) or entry:
            yield from _names(entry or kind, f"{prefix}{name}.0." if entry else f"{prefix}{name}.")
        else:
            yield prefix + name
