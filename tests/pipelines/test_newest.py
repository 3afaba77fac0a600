"""The link by which documents and people name a run's model."""

from __future__ import annotations

import shutil
from pathlib import Path

from pipelines.newest import link_newest


def made(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text(name)
    return folder / name


def test_the_link_is_the_last_model_of_that_name_and_moves_with_its_folder(tmp_path: Path):
    outputs = tmp_path / "outputs"
    first, second = made(outputs / "store", "export-1"), made(outputs / "store", "export-2")
    assert link_newest(first, outputs=outputs, name="quickstart") == outputs / "models" / "quickstart"
    assert link_newest(second, outputs=outputs, name="quickstart") == outputs / "models" / "quickstart"
    assert link_newest(first, outputs=outputs, name="../a name/x") == outputs / "models" / "a-name-x"
    shutil.move(outputs, tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "models" / "quickstart" / "config.json").read_text() == "export-2"
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "models").iterdir()) == ["a-name-x", "quickstart"]


def test_what_is_no_link_is_left_alone(tmp_path: Path):
    model = made(tmp_path / "store", "export-1")
    own = made(tmp_path / "models", "mine")
    assert link_newest(model, outputs=tmp_path, name="mine") is None
    assert (own / "config.json").read_text() == "mine"


def test_a_place_that_takes_no_link_fails_nothing(tmp_path: Path):
    (tmp_path / "models").write_text("a file")
    assert link_newest(made(tmp_path / "store", "export-1"), outputs=tmp_path, name="mine") is None
