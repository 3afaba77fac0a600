"""From `paths.store` to the store that it names: a folder, `file://`, `s3://`, or any URI that pyarrow or fsspec has a filesystem for.

Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, an instance's role, ...), never from the URI: it is part of the
config, which is logged. Errors show the URI without its query.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

from pipelines.credentials import SECRET
from pipelines.store.disk import Store
from tasks.stage import UserError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

DRIVE = re.compile(r"^[a-zA-Z]:[\\/]")
NO_BUCKET = r"NO_SUCH_BUCKET|NoSuchBucket|bucket does not exist|[Bb]ucket '.*' not found"
NO_ACCESS = (
    r"ACCESS_DENIED|AccessDenied|INVALID_ACCESS_KEY|InvalidAccessKeyId|SIGNATURE_DOES_NOT_MATCH|SignatureDoesNotMatch|"
    r"UNRECOGNIZED_CLIENT|INVALID_CLIENT_TOKEN|MISSING_AUTHENTICATION|[Cc]redentials|(?:status|code):? 40[13]"
)
NO_NETWORK = r"NETWORK_CONNECTION|curlCode|[Cc]onnect|resolve"
ADVICE = {  # what an error of a filesystem holds -> what to do
    NO_BUCKET: "there is no such bucket; make it, or correct the name",
    NO_ACCESS: "no access; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of one who may list, read, write and delete there",
    NO_NETWORK: "it cannot be reached; check endpoint_override and scheme in the URI, and the network",
}


def is_remote(uri: str) -> bool:
    """Whether this is object storage, so that stages work in a folder of this machine's."""
    return "://" in uri and not uri.startswith("file://") and not DRIVE.match(uri)


def open_store(uri: str, *, work: Path, setting: str = "paths.store", read_only: bool = False) -> Store:
    """The store at `uri`. work: the local folder that stages work in where the store itself is object storage; else unused.

    Raises UserError naming `setting` and the fix: no such bucket, no access, a module that is missing, a folder that cannot be written.
    read_only: object storage is only listed at first, not written to.
    """
    if not is_remote(uri):
        return Store(_local_path(uri, setting), setting=setting)
    from pipelines.store.objects import ObjectStore

    shown = without_query(uri)
    _refuse_credentials(uri, shown, setting)
    filesystem, base = _filesystem(uri, shown, setting)
    store = ObjectStore(filesystem, base, work=work, shown=f"{setting}={shown}", query=urlsplit(uri).query)
    store.check(read_only=read_only)
    return store


def refuse_credentials_on(command_line: Iterable[str], *, setting: str = "paths.store") -> None:
    """Raises UserError for a store's URI that holds some: before Hydra writes the command line into the run's folder."""
    for text in command_line:
        name, _, value = text.partition("=")
        if name.lstrip("+") == setting:
            for uri in re.split(r",(?=['\"]?[a-z][\w+.-]*://)", value):  # of a sweep
                uri = uri.strip("'\" ")
                if is_remote(uri):
                    _refuse_credentials(uri, without_query(uri), setting)


def without_query(uri: str) -> str:
    """As it may be shown: scheme, host without user, path."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def explained(error: BaseException) -> str:
    """What is wrong with an object store and what to do, in one line without credentials."""
    text = str(error)
    for pattern, advice in ADVICE.items():
        if re.search(pattern, text):
            return advice
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"(?i)\b(\w*(?:key|secret|token|password|signature)\w*)\s*[=:]\s*\S+", r"\1=...", first)[:300]


def _local_path(uri: str, setting: str) -> Path:
    if not uri.startswith("file://"):
        return Path(uri)
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UserError(f"{setting}={uri}: a file URI has three slashes and an absolute path, as in file:///data/store")
    return Path(unquote(parts.path))


def _refuse_credentials(uri: str, shown: str, setting: str) -> None:
    parts = urlsplit(uri)
    secret = [name for name in parse_qs(parts.query, keep_blank_values=True) if SECRET.search(name)]
    if secret or ":" in parts.netloc.rpartition("@")[0]:
        what = f"{secret[0]} in its query" if secret else "a password before @"
        raise UserError(f"{setting}={shown}: holds {what}, and settings are logged; give credentials by the environment (AWS_ACCESS_KEY_ID, ...)")


def _filesystem(uri: str, shown: str, setting: str) -> tuple[FileSystem, str]:
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
    from pyarrow.lib import ArrowException, ArrowInvalid

    try:
        filesystem, base = FileSystem.from_uri(uri)
    except ArrowInvalid as error:
        if "Unrecognized filesystem type" not in str(error):  # a query key that the filesystem does not know
            raise UserError(f"{setting}={shown}: {explained(error)}") from error
        import fsspec

        try:
            inner, base = fsspec.core.url_to_fs(uri)
        except ImportError as missing:
            raise UserError(f"{setting}={shown}: {str(missing).splitlines()[0]}; install that module, on every node") from missing
        except ValueError as unknown:
            raise UserError(
                f"{setting}={shown}: no filesystem for this; give a folder, file://, s3://, gs:// or another that fsspec knows"
            ) from unknown
        filesystem = PyFileSystem(FSSpecHandler(inner))
    except (OSError, ArrowException) as error:
        raise UserError(f"{setting}={shown}: {explained(error)}") from error
    base = base.strip("/") if filesystem.type_name in ("s3", "gcs", "abfs") else base.rstrip("/")
    if not base:
        raise UserError(f"{setting}={shown}: names no bucket; give one, as in s3://bucket/folder")
    return filesystem, base
