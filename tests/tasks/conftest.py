"""Finished stages on a random tiny model, made once: read them, never write into them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prompts_folder(tmp_path_factory) -> Path:
    from tests.tasks.tiny_stage import build_prompts

    folder = tmp_path_factory.mktemp("stages") / "prompts"
    build_prompts(folder)
    return folder


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory, prompts_folder) -> Path:
    from tests.tasks.tiny_stage import build_base

    folder = tmp_path_factory.mktemp("stages") / "base"
    build_base(folder, prompts_folder / "tokenizer")
    return folder


@pytest.fixture
def stage_inputs(prompts_folder, base_folder) -> dict[str, Path]:
    return {"prompts": prompts_folder, "model": base_folder}


@pytest.fixture
def test_prompts(prompts_folder):
    from tasks.artifacts import read_prompts

    return read_prompts(prompts_folder, "test")


@pytest.fixture
def calls(monkeypatch):
    """Every decoding of the speed part, in order: (prompt id, method, block size)."""
    from tests.tasks.tiny_evaluation import record_calls

    return record_calls(monkeypatch)
