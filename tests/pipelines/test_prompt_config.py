"""The settings of the prompt sources as a config: nested ones are checked by name, and data is known by its content, not its place."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pipelines import stages
from tasks.stage import UserError
from tests.pipelines.configs import built


@pytest.fixture
def prompts(tmp_path: Path):
    """overrides -> the prompts stage and its fingerprint."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def build(*overrides: str):
        config = built("experiment=smoke", f"model.path={model}", *overrides)
        graph = stages.build_graph(config, identity_cache=tmp_path / "cache")
        return graph.stages[0], graph.fingerprints["prompts"]

    return build


def shards(folder: Path, *texts: str) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"train-{number:05d}.jsonl").write_text(text)
    return folder


def test_a_folder_is_known_by_the_contents_of_its_files(prompts, tmp_path: Path):
    folders = [
        shards(tmp_path / "a", "one", "two"),
        shards(tmp_path / "b", "two", "one"),  # the order of shards says nothing
        shards(tmp_path / "c", "one", "three"),
        shards(tmp_path / "d", "one"),
    ]
    found = [prompts("data.source=file", f"data.path={folder}")[1] for folder in folders]
    assert found[0] == found[1] and len(set(found)) == 3
    shutil.move(folders[0], tmp_path / "moved")
    assert prompts("data.source=file", f"data.path={tmp_path / 'moved'}")[1] == found[0]


def test_a_hub_data_set_is_read_at_the_commit_that_it_was_identified_by(prompts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stages, "hub_commit", lambda name, revision: {"main": "c0ffee", "v1": "decade"}[revision or "main"])
    found = {}
    for revision in ("main", "v1"):
        settings = ["data.source=open_code_instruct", "data.path=nvidia/OpenCodeInstruct", f"data.revision={revision}"]
        stage, found[revision] = prompts(*settings)
        assert stage.external["data"] == {"hub": "nvidia/OpenCodeInstruct", "commit": stage.config.revision}
    assert found["main"] != found["v1"] and prompts(*settings[:2])[1] == found["main"]


def test_rules_reach_the_fingerprint_and_the_stage(prompts, tmp_path: Path):
    place = [f"data.path={shards(tmp_path / 'a', 'one')}", "data.source=open_code_instruct"]
    stage, default = prompts(*place)
    assert (stage.config.open_code_instruct.min_test_score, stage.config.open_code_instruct.min_judge_score) == (1.0, 5.0)
    stage, other = prompts(*place, "data.open_code_instruct.min_judge_score=null")
    assert stage.config.open_code_instruct.min_judge_score is None and other != default
    stage, _ = prompts(f"data.path={tmp_path / 'a'}", "data.source=open_thoughts", "data.open_thoughts_sources=[automath,nvidia_math]")
    assert stage.config.open_thoughts_sources == ["automath", "nvidia_math"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.open_code_instruct.min_test_score=2"], "data.open_code_instruct.min_test_score must lie between 0 and 1, got 2"),
        (["data.source=open_thoughts"], "data.path is missing: data.source=open_thoughts needs a file"),
        (["data.max_prompt_tokens=0"], "data.max_prompt_tokens must be at least 1"),
    ],
)
def test_mistakes_are_named(prompts, overrides, says):
    with pytest.raises(UserError, match=f"^{re.escape(says)}"):
        prompts(*overrides)


def test_missing_data_is_named_before_anything_runs(prompts, tmp_path: Path):
    with pytest.raises(UserError, match=r"^data\.path=.*/none\.parquet: cannot be read"):
        prompts("data.source=file", f"data.path={tmp_path}/none.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"^data\.path=.*/empty: the folder must hold data files of one format"):
        prompts("data.source=open_code_instruct", f"data.path={tmp_path}/empty")
