"""The documentation builds, with every warning an error, and needs nothing from elsewhere to be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented.commands import ROOT

ELSEWHERE = r"""["']?(?:https?:)?//"""
LOADED = re.compile(
    rf"""<(?:script|img|iframe|source)\b[^>]*?\bsrc={ELSEWHERE}|<link\b(?=[^>]*rel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*href={ELSEWHERE}"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} <= {page.parent.name for page in pages}
    for page in pages:
        text = page.read_text()
        assert not LOADED.search(text), f"{page.relative_to(site)} loads something from elsewhere"
        assert 'class="mermaid"' not in text  # the theme would fetch what draws it
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"@import|url\(['\"]?(https?:)?//", styles)


def test_markup_became_pages(site: Path):
    """What Markdown leaves as it stands looks like its source: a list or table without a blank line before it, a fence, a mark of ours."""
    for page in site.rglob("index.html"):
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        left = re.findall(r"^\s*(?:[*-] \S.*|\|.*\||```.*)$", text, re.MULTILINE)
        assert not left, f"{page.relative_to(site)}: {left[:3]}"


def test_the_reference_knows_every_public_name(site: Path):
    import jacobi_core

    reference = (site / "api" / "index.html").read_text()
    assert [name for name in jacobi_core.__all__ if not re.search(rf'id="[\w.]+\.{name}"', reference)] == []


def test_the_search_can_fail():
    assert LOADED.search('<script async src="https://example.org/a.js"></script>') and LOADED.search('<link href="//x.org/f.css" rel="stylesheet">')
    assert not LOADED.search('<script src="assets/a.js"></script><a href="https://example.org">x</a>')
