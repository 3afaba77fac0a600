"""What several tests of the small tools, and of tracking, share."""

from __future__ import annotations

import shutil
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


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database to copy: making one takes two seconds."""
    from pipelines.tracking import mlflow_runs
    from pipelines.tracking.tracker import sqlite_uri

    folder = tmp_path_factory.mktemp("database")
    mlflow_runs.connect(sqlite_uri(folder)).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def uri(tmp_path: Path, empty_database: Path) -> str:
    """An empty tracking store, in a folder with a blank in its name."""
    from pipelines.tracking.tracker import sqlite_uri

    folder = tmp_path / "my outputs"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return sqlite_uri(folder)
