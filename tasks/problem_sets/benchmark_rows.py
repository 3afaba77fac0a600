"""Rows of a published benchmark: from a local file or folder, or from the hub, with the fields it is known to have. Knows no benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tasks.row_files import HubPart, open_rows
from tasks.stage import UserError


def benchmark_rows(
    path: str | Path,
    *,
    key: str,
    texts: Sequence[str] = (),
    lists: Sequence[str] = (),
    optional: Sequence[str] = (),
    part: HubPart | None = None,
    setting: str = "data.path",
    most: int | None = None,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row, and where it stands (for errors). `texts` are strings, `lists` lists of strings, `key` is there and unique, `optional` as it is.

    part: which part is read where `path` is a hub id. setting: what named `path`, for errors.
    most: rows of the published set; more of them hold training rows too.
    Raises UserError, naming file and row, for a field that is missing or of another type, for a key that occurs twice, for no row at all or
    too many.
    """
    seen: set[Any] = set()
    needed = dict.fromkeys([key, *texts, *lists])
    for file in open_rows(path, setting=setting, part=part):
        for number, row in file.read([*needed, *optional]):
            where = f"{file.where}, row {number}"
            if not isinstance(row, dict):
                row = {}
            for field in needed:
                value, listed = row.get(field), field in lists
                right = isinstance(value, list) and all(isinstance(item, str) for item in value) if listed else isinstance(value, str)
                if not right and not (field == key and isinstance(value, int)):
                    kind = "no list of strings" if listed else "no string"
                    raise UserError(f"{where}: field {field!r} is missing or {kind}; each row needs {', '.join(needed)}")
            if row[key] in seen:
                raise UserError(f"{where}: {key} {row[key]!r} occurs twice; make it unique")
            seen.add(row[key])
            if most is not None and len(seen) > most:
                raise UserError(f"{setting}={path}: has more than the {most} rows of the test set; give its file alone")
            yield row, where
    if not seen:
        raise UserError(f"{setting}={path}: has no rows; give data with at least one problem")
