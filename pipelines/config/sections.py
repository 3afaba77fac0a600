"""From a composed config to dataclasses, gathering every mistake rather than stopping at the first.

A field that is wrong is put back to its default and its section is made again, so that the section's other fields are checked too; what
would be told because of such a default is not told.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

UNUSABLE = object()  # an entry of a list whose required settings are wrong


class Sections:
    """Reads the sections of one config."""

    def __init__(self, typed: Any) -> None:
        """typed: merged with its schema."""
        self._typed = typed
        self.mistakes: list[str] = []
        self._replaced: set[str] = set()  # settings, or whole sections, that hold a default in place of what was given

    def read(self, name: str) -> Any:
        """The section as an object that is sound in itself."""
        try:
            node = self._typed[name]
        except OmegaConfBaseException as error:
            return self._refused(error, name, _default(OmegaConf.get_type(self._typed), name))
        return self._object(node, name)

    def unsure(self, message: str) -> bool:
        """Whether the message names a field that was put back to its default."""
        return any(re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", message) for path in self._replaced)

    def _refused(self, error: OmegaConfBaseException, path: str, default: Any) -> Any:
        from pipelines.errors import config_error  # which knows the schema, and that this

        self.mistakes.append(config_error(error))
        self._replaced.add(path)
        return default

    def _object(self, node: Any, path: str) -> Any:
        """What it holds comes first, so that an error can say where it is."""
        if not OmegaConf.is_config(node):
            return node
        if OmegaConf.is_list(node):
            entries = [self._child(node, i, f"{path}.{i}", None) for i in range(len(node))]
            if UNUSABLE in entries:
                self._replaced.add(path)
            return [entry for entry in entries if entry is not UNUSABLE]
        kind = OmegaConf.get_type(node)
        if not dataclasses.is_dataclass(kind):
            return {key: self._child(node, key, f"{path}.{key}", None) for key in node}
        values = {f.name: self._child(node, f.name, f"{path}.{f.name}", kind) for f in dataclasses.fields(kind)}
        if any(value is UNUSABLE for value in values.values()):
            return UNUSABLE
        return self._sound(kind, values, path)

    def _child(self, node: Any, key: Any, path: str, kind: type | None) -> Any:
        try:
            child = node[key]
        except OmegaConfBaseException as error:
            default = _default(kind, key) if kind else UNUSABLE
            return self._refused(error, path, UNUSABLE if default is dataclasses.MISSING else default)
        if isinstance(child, float) and math.isnan(child):  # no comparison of a section's own checks finds it
            self.mistakes.append(f"{path} must be a number, got nan")
            self._replaced.add(path)
            return _default(kind, key) if kind else UNUSABLE
        return self._object(child, path)

    def _sound(self, kind: type, values: dict[str, Any], path: str) -> Any:
        """An object of the dataclass; a value it refuses is told and replaced. A section whose defaults it refuses is replaced as a whole."""
        replaced: set[str] = set()
        while True:
            try:
                return kind(**values)
            except ValueError as error:  # its message begins with the field
                message = f"{path}.{str(error).removeprefix(path.rpartition('.')[2] + '.')}"
            name = re.match(r"\w*", message.removeprefix(f"{path}."))[0]
            if not any(re.search(rf"\b{other}\b", message.removeprefix(f"{path}.")) for other in replaced):
                self.mistakes.append(message)
            if name in replaced or name not in values or (default := _default(kind, name)) is dataclasses.MISSING:
                self._replaced.add(path)
                return _blank(kind, values)
            replaced.add(name)
            self._replaced.add(f"{path}.{name}")
            values[name] = default


def _default(kind: type, name: str) -> Any:
    field = next(f for f in dataclasses.fields(kind) if f.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _blank(kind: type, values: dict[str, Any]) -> Any:
    """All defaults, and what has none as it was given, if that can be."""
    needed = {f.name for f in dataclasses.fields(kind) if _default(kind, f.name) is dataclasses.MISSING}
    try:
        return kind(**{name: value for name, value in values.items() if name in needed})
    except ValueError:
        return UNUSABLE
