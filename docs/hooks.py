"""Of mkdocs: makes the two API pages readable. Our docstrings say `name: meaning`, a line each, and what a setting means stands in the source."""

from __future__ import annotations

import re
from typing import Any

_PARAGRAPH = re.compile(r"<p>.*?</p>", re.DOTALL)
_ENTRY = re.compile(r"(?:(?<=<p>)|\n)((?:\w+(?:, )?)+)(?=: )")  # at the beginning of a line: one or more names


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Lines of a docstring that explain an argument begin on a line of their own; sources are open."""
    if page.file.src_uri not in ("api.md", "stage-settings.md"):
        return html
    html = html.replace('<details class="mkdocstrings-source">', '<details class="mkdocstrings-source" open>')
    return _PARAGRAPH.sub(lambda paragraph: _lines(paragraph[0]), html)


def _lines(paragraph: str) -> str:
    paragraph = _ENTRY.sub(lambda entry: f"{'<br>' if entry[0].startswith(chr(10)) else ''}<code>{entry[1]}</code>", paragraph)
    return paragraph.replace("\nRaises ", "<br>Raises ")
