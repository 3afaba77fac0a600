"""The commands that README and docs/ show: read off their fenced blocks, with what the runner has to know of each. Standard library only.

A block says what it is: ```bash holds commands, one per line (a backslash continues it). A comment directly above a block of commands marks it:

    <!-- skip KIND: reason -->   the runner leaves it out; KIND is one of KINDS
    <!-- serves: TEXT -->        its first command stays up, and is ready once it has printed TEXT; the others are asked of it
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS, LANGUAGES = "bash", ("bash", "python", "text", "yaml", "json")
KINDS = ("gpu", "cluster", "network", "long", "yours")  # yours: holds a name that only the reader knows
_FENCE = re.compile(r"^\s*```(?P<language>\S*)\s*$")
_MARK = re.compile(r"^\s*<!-- (?:skip (?P<kind>\w+)|serves): (?P<text>.+?) -->\s*$")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its opening fence, from 1."""

    file: str
    line: int
    language: str
    text: str
    skip: str | None = None  # KIND
    reason: str = ""
    serves: str | None = None

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Of a block of commands, as they are typed."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def documents() -> list[Path]:
    """README, how to contribute, and every page."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(file: Path) -> list[Block]:
    """The fenced blocks of a file, in order. Raises ValueError, naming the line, for a fence that is not closed or a mark of another form."""
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else file.name
    found, lines, mark = [], file.read_text(encoding="utf-8").splitlines(), None
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if mark_match := _MARK.match(line):
            mark = mark_match
            continue
        if not (fence := _FENCE.match(line)):
            if re.match(r"\s*<!--\s*(skip|serves)\b", line):
                raise ValueError(f"{name}:{number}: a mark is <!-- skip KIND: reason --> or <!-- serves: TEXT -->, got {line.strip()}")
            mark = None
            continue
        start = number
        while number < len(lines) and not _FENCE.match(lines[number]):
            number += 1
        if number == len(lines):
            raise ValueError(f"{name}:{start}: the block is not closed")
        found.append(Block(name, start, fence["language"], textwrap.dedent("\n".join(lines[start:number])), **_marked(mark)))
        number, mark = number + 1, None
    return found


def _marked(mark: re.Match | None) -> dict[str, str]:
    if mark is None:
        return {}
    return {"skip": mark["kind"], "reason": mark["text"]} if mark["kind"] else {"serves": mark["text"]}


def inline_code(file: Path) -> list[str]:
    """What stands between single backticks outside of blocks."""
    outside, inside = [], False
    for line in file.read_text(encoding="utf-8").splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            outside.append(line)
    return [code for line in outside for code in _INLINE.findall(line)]
