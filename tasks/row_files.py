"""Rows out of a user's data, whatever holds them: jsonl, csv, Parquet, a folder of such files, a data set saved on disk or on the hub.

One row at a time, text as it is: nothing is stripped, joined, normalised or has its line ends changed. What a row means is the caller's
business. Every error names the setting, the file and, where there is one, the row.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.stage import UserError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
BATCH = 512  # rows decoded at once
Rows = Iterator[tuple[int, Any]]  # row number from 1, row: a dict by field name, or for jsonl whatever JSON value stands there


@dataclass(frozen=True)
class RowFile:
    """One file or data set. `where` starts every error about it; `fields` are those of its first row, None where it has none."""

    where: str
    fields: list[str] | None
    read: Callable[[Sequence[str] | None], Rows]  # of all fields, or only of the named ones where that saves reading

    def require(self, *names: str) -> None:
        """Raises UserError for the first field that is missing, listing those that are there."""
        for name in names:
            if self.fields is not None and name not in self.fields:
                raise UserError(f"{self.where}: field {name!r} is missing; it has: {', '.join(self.fields)}")


@dataclass(frozen=True)
class HubPart:
    """Which part of a data set on the hub, or saved by `datasets`, is read."""

    subset: str | None = None
    split: str = "train"
    revision: str | None = None


def open_rows(path: str | Path, *, setting: str, part: HubPart | None = None) -> Iterator[RowFile]:
    """The files of `path`, in the order of their names. Raises UserError, starting with `setting`=`path`, where it cannot be read."""
    part = part or HubPart()
    if is_hub_id(path):
        yield _data_set(f"{setting}={path}", lambda: _load_from_hub(str(path), part, f"{setting}={path}"), part)
    elif _saved_by_datasets(Path(path)):
        import datasets

        yield _data_set(f"{setting}={path}", lambda: datasets.load_from_disk(str(path)), part)
    else:
        for file in data_files(path, setting=setting):
            yield FORMATS[_format(file) or "jsonl"](f"{setting}={file}", file)


def is_hub_id(path: str | Path) -> bool:
    """ORG/NAME, where no such path exists here."""
    return bool(HUB_ID.fullmatch(str(path))) and not _format(Path(path)) and not Path(path).exists()


def data_files(path: str | Path, *, setting: str) -> list[Path]:
    """The files that hold the rows of `path`, by name. Raises UserError where there are none, or of several formats."""
    place = Path(path)
    if place.is_dir():
        if _saved_by_datasets(place):
            return sorted(place.rglob("*.arrow"))
        visible = (file for file in place.rglob("*") if not any(name.startswith(".") for name in file.relative_to(place).parts))
        files = sorted(file for file in visible if _format(file) and file.is_file())
        found = {_format(file) for file in files}
        if len(found) != 1:
            raise UserError(f"{setting}={path}: the folder must hold data files of one format ({ENDINGS}), it holds {sorted(found) or 'none'}")
        return files
    try:
        place.open("rb").close()
    except OSError as error:
        raise UserError(f"{setting}={path}: cannot be read ({error.strerror}); name a file ({ENDINGS}), a folder or a hub id ORG/NAME") from error
    if place.suffix and not _format(place):  # without an ending it is jsonl
        raise UserError(f"{setting}={path}: its format is told by its ending, and {place.suffix} is none of {ENDINGS}; rename or convert it")
    return [place]


def _saved_by_datasets(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


# ---- text files


def _opened(file: Path, *, newline: str) -> IO[str]:
    # utf-8-sig: a byte order mark belongs to the file, not to its first field
    return (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig", newline=newline)


def _text_file(rows: Callable[[str, Path], Rows]) -> Callable[[str, Path], RowFile]:
    def read(where: str, file: Path) -> Rows:
        number = 0
        try:
            for number, row in rows(where, file):
                yield number, row
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise UserError(f"{where}: cannot be read (after row {number}: {error})") from error

    def opened(where: str, file: Path) -> RowFile:
        first = next(read(where, file), None)
        fields = None if first is None else list(first[1]) if isinstance(first[1], dict) else []
        return RowFile(where, fields, lambda names: read(where, file))

    return opened


def _jsonl(where: str, file: Path) -> Rows:
    with _opened(file, newline="\n") as lines:  # only \n ends a line: U+2028 and \r may stand inside one
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                    if "\\u" in line:  # half a surrogate pair is text for JSON, and for nothing after it
                        json.dumps(row, ensure_ascii=False).encode()
                except ValueError as error:
                    raise UserError(f"{where}, row {number}: not JSON with Unicode text ({error})") from error
                yield number, row


def _csv(where: str, file: Path) -> Rows:
    csv.field_size_limit(sys.maxsize)  # the default refuses a field of 128 KiB
    with _opened(file, newline="") as lines:  # line ends inside quotes stay as they are
        table = csv.reader(lines, strict=True)
        number = 0
        try:
            header = next(table, [])
            if len(set(header)) < len(header):
                raise UserError(f"{where}: the header line names a column twice; make its names distinct")
            for cells in table:
                if cells:
                    number += 1
                    if len(cells) != len(header):
                        raise UserError(f"{where}, row {number}: has {len(cells)} cells, the header line has {len(header)}")
                    yield number, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise UserError(f"{where}, row {number + 1}: not CSV ({error}); quote text that holds a comma, quote or line end") from error


# ---- columnar files


def _parquet(where: str, file: Path) -> RowFile:
    try:
        table = pq.ParquetFile(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{where}: not a readable Parquet file ({error})") from error
    return _columnar(where, table.schema_arrow.names, lambda names: table.iter_batches(BATCH, columns=names), table.metadata.num_rows)


def _data_set(where: str, load: Callable[[], Any], part: HubPart) -> RowFile:
    import datasets

    datasets.disable_progress_bars()
    found = load()
    if isinstance(found, dict):
        if part.split not in found:
            raise UserError(f"{where}: has no split {part.split!r}; set data.source_split to one of {', '.join(found)}")
        found = found[part.split]

    def batches(names: list[str]) -> Iterator[Any]:
        return found.select_columns(names).with_format("arrow").iter(BATCH)

    return _columnar(where, found.column_names, batches, len(found))


def _columnar(where: str, present: list[str], batches: Callable[[list[str]], Iterator[Any]], count: int) -> RowFile:
    def read(names: Sequence[str] | None) -> Rows:
        number = 0
        try:
            for batch in batches([name for name in present if names is None or name in names]):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (OSError, pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot be read (after row {number}: {error})") from error

    return RowFile(where, present if count else None, read)


def _load_from_hub(name: str, part: HubPart, where: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, part.subset, split=part.split, revision=part.revision)
    except Exception as error:  # offline, unknown, forbidden, no such subset or split: each library below raises its own kind
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{where}: is no path here, and the hub's data set cannot be loaded ({reason}); check data.subset and data.source_split, "
            f"or download it (hf download --repo-type dataset {name} --local-dir FOLDER) and give the folder"
        ) from error


def hub_commit(name: str, revision: str | None) -> str | None:
    """The commit that `revision` (main by default) of a data set means: from the local hub cache, else asked from the hub; None: unknown."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    reference = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="dataset"), "refs", revision or "main")
    if reference.is_file():
        return reference.read_text().strip()
    if constants.HF_HUB_OFFLINE:  # asking would take its timeouts all the same
        return revision
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=10).sha
    except Exception:  # loading it will tell why
        return revision


FORMATS: dict[str, Callable[[str, Path], RowFile]] = {"jsonl": _text_file(_jsonl), "csv": _text_file(_csv), "parquet": _parquet}
_BY_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
ENDINGS = ".jsonl, .csv, either with .gz, or .parquet"


def _format(file: Path) -> str | None:
    ending = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    return _BY_ENDING.get(ending.lower())
