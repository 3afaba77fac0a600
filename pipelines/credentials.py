"""Passwords and tokens within addresses: hidden wherever an address is written, logged or printed. What connects has the address itself.

Hidden are the password of `scheme://user:password@host`, all before `@` of an http address (it may be a token), and values of a query whose
name says that they are secret. The way to give credentials is the environment (docs/tracking.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks.artifacts import write_text

HIDDEN = "..."
SECRET = re.compile(r"key|secret|token|password|sas|sig|credential", re.IGNORECASE)  # in names of a query's values
# up to the last @ of the host part; one that is left unquoted in the password, or a slash, hides no less. HOST:PORT/ is no password
_PASSWORD = re.compile(r"""(\w://[^/:@\s'"]*:)(?!\d{1,5}[/?#])(?:[^\s'"/?#]*|[^@\s'"]*)@""")
_HTTP_TOKEN = re.compile(r"""(https?://)[^/:@?#\s'"]+@""")
_QUERY = re.compile(r"""([?&]([\w.-]+)=)[^&\s'"#]+""")


def redacted(text: str) -> str:
    """The text with the credentials of all addresses in it hidden."""
    if "://" not in text:
        return text
    text = _HTTP_TOKEN.sub(rf"\1{HIDDEN}@", _PASSWORD.sub(rf"\1{HIDDEN}@", text))
    return _QUERY.sub(lambda found: found[1] + HIDDEN if SECRET.search(found[2]) else found[0], text)


def redacted_values(value: Any) -> Any:
    """The same of all texts in nested mappings and lists."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: redacted_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_values(inner) for inner in value]
    return value


def restored(shown: str, known: str | None) -> str:
    """The address that was written as `shown`, where it is the one that is `known`; else as it was written."""
    return known if known is not None and redacted(known) == shown else shown


def redact_files(files: Iterable[Path]) -> None:
    """Of what Hydra has written before we were asked."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        if (hidden := redacted(text)) != text:
            write_text(file, hidden)
