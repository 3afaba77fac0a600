"""Many prompts: written row group by row group, read by position without loading the rest."""

from __future__ import annotations

import random

import pyarrow.parquet as pq
import pytest

from tasks import artifacts
from tasks.artifacts import Prompt, PromptRows
from tasks.stage import UserError

COUNT = 2 * artifacts.PROMPT_ROW_GROUP + 3  # two full row groups and a short one


def made():
    """A stream, as the stage writes one: splits alternate, so that both cross row groups."""
    for i in range(COUNT):
        yield Prompt(i * 7, "train" if i % 3 else "test", [{"role": "user", "content": f"p{i}\r\n\t "}], list(range(i % 11)), {"n": i})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts")
    artifacts.write_prompts(path, made(), template_sha256="ab" * 32)
    return path


@pytest.mark.parametrize("split", ["train", "test", "validation"])
def test_rows_of_a_split_are_those_that_reading_all_gives(folder, split):
    expected = [p for p in made() if p.split == split]
    rows = PromptRows(folder, split)
    assert artifacts.read_prompts(folder, split) == expected
    assert len(rows) == len(expected)
    assert rows.ids.tolist() == [p.id for p in expected]
    assert str(rows.ids.dtype) == "int64" and rows.read([]) == []
    positions = list(range(len(expected)))
    random.Random(0).shuffle(positions)
    assert rows.read(positions) == [expected[i] for i in positions]


def test_the_file_is_plain_parquet_in_row_groups_with_the_templates_hash(folder):
    file = pq.ParquetFile(folder / "prompts.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [artifacts.PROMPT_ROW_GROUP] * 2 + [3]
    assert file.schema_arrow.metadata[b"chat_template_sha256"] == b"ab" * 32 and file.schema_arrow.metadata[b"artifact"] == b"prompts"


def test_an_error_while_writing_leaves_no_file(tmp_path):
    def broken():
        yield from list(made())[:600]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        artifacts.write_prompts(tmp_path, broken())
    assert list(tmp_path.iterdir()) == []


def test_another_artifact_or_no_file_is_refused_by_name(tmp_path, folder):
    with pytest.raises(UserError, match=r"prompts\.parquet: not a readable"):
        PromptRows(tmp_path, "train")
    table = pq.read_table(folder / "prompts.parquet").replace_schema_metadata({"artifact": "packed", "schema_version": "1"})
    pq.write_table(table, tmp_path / "prompts.parquet")
    with pytest.raises(UserError, match="holds packed version 1, expected prompts version 1"):
        PromptRows(tmp_path, "train")
