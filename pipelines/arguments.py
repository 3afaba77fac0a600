"""Command lines of the small tools: `key=value`, typed by a dataclass, anything else refused in one line.

No Hydra: there `model=/some/folder` would name a config group and `prompt=def f(x): ...` be a grammar error. Here a value is what
stands behind the first `=`, verbatim. Lists are comma separated. Knows nothing about any one tool.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from tasks.stage import UserError

T = TypeVar("T")
HELP = {"help", "--help", "-h"}


def run_tool(argv: Sequence[str], arguments: type[T], work: Callable[[T], int]) -> int:
    """`work` on the parsed arguments; returns its exit code, 0 after `help`, 2 for a mistake of the user's (one line on stderr)."""
    if HELP & set(argv):
        print(usage(arguments))
        return 0
    try:
        return work(parse(argv, arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr, flush=True)
        return 130


def parse(argv: Sequence[str], arguments: type[T]) -> T:
    """An instance of the dataclass `arguments` from `key=value` strings.

    Fields are `name: Annotated[type, "comment for help"]`; a type may be bool, int, float, str, an Enum (by member value), a list of
    these, and any of them or None ("none"; where a text may be None, it cannot be the word none).
    Raises UserError, one line naming the key, for one that is unknown, missing, given twice or badly typed, and for what the
    dataclass's own checks refuse.
    """
    fields = {f.name: f for f in dataclasses.fields(arguments)}
    kinds = typing.get_type_hints(arguments)
    values: dict[str, Any] = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=3)
            hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(fields)}"
            raise UserError(f"{key}: no such setting; {hint}")
        if not equals:
            raise UserError(f"{key}: needs a value, as in {key}=...")
        if key in values:
            raise UserError(f"{key}: given twice")
        try:
            values[key] = _typed(text, kinds[key])
        except ValueError:
            raise UserError(f"{key}={text}: expected {_expected(kinds[key])}") from None
    missing = [f.name for f in fields.values() if f.name not in values and _default(f) is dataclasses.MISSING]
    if missing:
        raise UserError(f"{missing[0]} is missing: {_comments(arguments)[missing[0]]}; give {missing[0]}=...")
    try:
        return arguments(**values)
    except ValueError as error:  # its message names the field
        raise UserError(str(error)) from error


def make_parent(setting: str, file: Path) -> None:
    """Raises UserError where `file` cannot be written for want of a folder: before minutes of work, not after."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{setting}={file}: cannot write there ({error.strerror}); choose another place") from error


def usage(arguments: type) -> str:
    """The dataclass's docstring, and one line per setting: name, default, comment."""
    fields = dataclasses.fields(arguments)
    shown = {f.name: f"{f.name}={_shown(_default(f))}" for f in fields}
    width = max(map(len, shown.values()))
    comments = _comments(arguments)
    lines = [f"    {shown[f.name]:<{width}}  {comments[f.name]}" for f in fields]
    return "\n".join([(arguments.__doc__ or "").strip(), "", *lines])


def _comments(arguments: type) -> dict[str, str]:
    return {name: kind.__metadata__[0] for name, kind in typing.get_type_hints(arguments, include_extras=True).items()}


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "..."
    if isinstance(default, list):
        return ",".join(map(_shown, default))
    if isinstance(default, Enum):
        return str(default.value)
    return str(default).lower() if isinstance(default, bool) or default is None else str(default)


def _typed(text: str, kind: Any) -> Any:
    """Raises ValueError where `text` is no `kind`."""
    if _is_optional(kind):
        return None if text.lower() == "none" else _typed(text, _inner(kind))
    if typing.get_origin(kind) is list:
        return [_typed(entry.strip(), _inner(kind)) for entry in text.split(",")]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return kind(text)


def _expected(kind: Any) -> str:
    if _is_optional(kind):
        return f"{_expected(_inner(kind))} or none"
    if typing.get_origin(kind) is list:
        return f"a comma separated list, each entry {_expected(_inner(kind))}"
    if issubclass(kind, Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")


def _is_optional(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType) and type(None) in typing.get_args(kind)


def _inner(kind: Any) -> Any:
    """T of list[T] and of T | None."""
    return next(a for a in typing.get_args(kind) if a is not type(None))
