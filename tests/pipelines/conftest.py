"""What several tests of the small tools share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """An untrained tiny model with its tokenizer."""
    from tests.tasks.tiny_stage import build_base, build_prompts

    folder = tmp_path_factory.mktemp("tools")
    build_prompts(folder / "prompts")
    build_base(folder / "base", folder / "prompts" / "tokenizer")
    return folder / "base"
