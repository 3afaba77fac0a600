"""Every format gives back the text that was put in, byte for byte; what cannot be read is named with its row and the fix."""

from __future__ import annotations

import csv
import gzip
import json
import tempfile
import unicodedata
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.hub import load_tokenizer
from tasks.prepare_prompts.template import template
from tasks.row_files import HubPart, data_files, hub_commit, is_hub_id, open_rows
from tasks.stage import UserError

AWKWARD = [
    "\t",
    "  ",
    "   \n",
    "\r\n",
    "\r",
    '"',
    ",",
    "'",
    "\\",
    "\\n",
    "🙂",
    "👩‍👩‍👧",
    "日本",
    "\u2028",
    "\x0b",
    "\x85",
    "\ufeff",
    "\x00",
    "{",
    "null",
]
TEXT = st.lists(st.sampled_from(AWKWARD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=8).map("".join)
ROWS = st.lists(st.fixed_dictionaries({"prompt": TEXT.filter(bool), "other": TEXT}), min_size=1, max_size=5)


def as_jsonl(folder, rows, *, ascii_only=False):
    lines = (json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    (folder / "a.jsonl").write_text("".join(lines), encoding="utf-8", newline="")
    return folder / "a.jsonl"


def as_escaped_jsonl(folder, rows):
    return as_jsonl(folder, rows, ascii_only=True)


def as_jsonl_gz(folder, rows):
    plain = as_jsonl(folder, rows)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    return folder / "b.jsonl.gz"


def as_csv(folder, rows, *, encoding="utf-8"):
    with (folder / "a.csv").open("w", encoding=encoding, newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return folder / "a.csv"


def as_csv_with_mark(folder, rows):
    return as_csv(folder, rows, encoding="utf-8-sig")  # as a spreadsheet saves it


def as_parquet(folder, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def as_shards(folder, rows):
    for number, row in enumerate(rows):
        (folder / "sub").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist([row]), folder / "sub" / f"train-{number:05d}.parquet")
    (folder / ".cache").mkdir(exist_ok=True)
    (folder / ".cache" / "x.csv").write_text("left by a download")
    (folder / "README.md").write_text("of the data set")
    return folder


def as_data_set(folder, rows):
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_data_set_with_splits(folder, rows):
    made = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list([{"prompt": "no", "other": "no"}]))
    made.save_to_disk(str(folder / "saved"))
    return folder / "saved"


WRITERS = [as_jsonl, as_escaped_jsonl, as_jsonl_gz, as_csv, as_csv_with_mark, as_parquet, as_shards, as_data_set, as_data_set_with_splits]


def read(path, names=None, **part):
    return [row for file in open_rows(path, setting="data.path", part=HubPart(**part)) for _, row in file.read(names)]


@pytest.fixture(scope="module")
def tokenizer(prompts_folder):
    return load_tokenizer(prompts_folder / "tokenizer")


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_text_is_what_was_written_up_to_the_tokenizer(write, tokenizer):
    slow = write in (as_data_set, as_data_set_with_splits)

    @settings(max_examples=6 if slow else 25, deadline=None)
    @given(ROWS)
    def check(rows):
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder), rows)
            assert read(path) == rows
            assert [row["prompt"] for row in read(path, ["prompt"])] == [row["prompt"] for row in rows]
        for row in rows:
            ids = template(tokenizer, [{"role": "user", "content": row["prompt"]}])
            fed = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
            assert tokenizer.decode(ids) == unicodedata.normalize("NFC", fed)  # the tokenizer's own first step, and nobody else's

    check()


def test_only_the_named_columns_are_decoded(tmp_path):
    rows = [{"prompt": "a", "other": "b"}]
    assert read(as_parquet(tmp_path, rows), ["prompt", "nowhere"]) == [{"prompt": "a"}]
    assert read(as_data_set(tmp_path, rows), ["other"]) == [{"other": "b"}]


def test_nested_columns_come_as_lists_and_dicts(tmp_path):
    rows = [{"conversations": [{"from": "user", "value": " x\r\n"}, {"from": "assistant", "value": "y"}]}, {"conversations": []}]
    assert read(as_parquet(tmp_path, rows)) == rows and read(as_data_set(tmp_path, rows)) == rows


def test_a_long_field_is_read_from_csv(tmp_path):
    rows = [{"prompt": "x,\n" * 200_000}]
    assert read(as_csv(tmp_path, rows)) == rows


def test_the_split_of_a_saved_data_set_is_chosen_or_named(tmp_path):
    path = as_data_set_with_splits(tmp_path, [{"prompt": "a", "other": "b"}])
    assert read(path, split="test") == [{"prompt": "no", "other": "no"}]
    with pytest.raises(UserError, match=r"has no split 'dev'; set data\.source_split to one of train, test"):
        read(path, split="dev")


def test_a_missing_field_is_named_with_those_that_are_there(tmp_path):
    rows = [{"prompt": "a", "other": "b"}]
    for write in WRITERS:
        (folder := tmp_path / write.__name__).mkdir()
        (file,) = open_rows(write(folder, rows), setting="data.path")
        file.require("prompt", "other")
        with pytest.raises(UserError, match=r"^data\.path=.*: field 'score' is missing; it has: prompt, other$"):
            file.require("prompt", "score")


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("a.csv", b"prompt,other\na\n", r"row 1: has 1 cells, the header line has 2"),
        ("a.csv", b"prompt\n\nb\na,b\n", r"row 2: has 2 cells, the header line has 1"),
        ("a.csv", b"prompt,prompt\na,b\n", r"names a column twice"),
        ("a.csv", b'prompt\na\n"b\n', r"row 2: not CSV"),
        ("a.csv", b'prompt\n"a"b\n', r"row 1: not CSV"),
        ("a.csv", b"prompt\n\xff\n", r"cannot be read"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\\ud83d"}\n', r"row 2: not JSON with Unicode text"),
        ("a.jsonl.gz", b"not gzip", r"cannot be read"),
        ("a.parquet", b"PAR1 not", r"not a readable Parquet file"),
        ("a.txt", b"x", r"its format is told by its ending, and \.txt is none of \.jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, raw, says):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=rf"^data\.path=.*{name}.*{says}") as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_folders_hold_one_format(tmp_path):
    with pytest.raises(UserError, match="must hold data files of one format .* it holds none"):
        data_files(tmp_path, setting="data.path")
    as_jsonl(tmp_path, [{"prompt": "a"}])
    as_csv(tmp_path, [{"prompt": "a"}])
    with pytest.raises(UserError, match=r"it holds \['csv', 'jsonl'\]"):
        data_files(tmp_path, setting="data.path")


def test_a_hub_id_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("nvidia/OpenCodeInstruct") and not is_hub_id("data/prompts.jsonl") and not is_hub_id("prompts") and not is_hub_id(tmp_path)
    (tmp_path / "org").mkdir()
    as_jsonl(tmp_path / "org", [{"prompt": "here"}])
    assert not is_hub_id("org/a.jsonl") and read("org/a.jsonl") == [{"prompt": "here"}]


def test_the_asked_for_part_of_a_hub_data_set_is_loaded(monkeypatch):
    """The library's own function stands in for the hub: what it is asked for, and that its rows come through."""
    asked = []

    def load_dataset(name, subset, *, split, revision):
        asked.append((name, subset, split, revision))
        return datasets.Dataset.from_list([{"question": " a\r\n", "answer": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("org/set", subset="main", split="test", revision="c0ffee") == [{"question": " a\r\n", "answer": "b"}]
    assert asked == [("org/set", "main", "test", "c0ffee")]


def test_a_hub_commit_comes_from_the_local_cache_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "datasets--org--set" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("c0ffee")
    assert hub_commit("org/set", None) == "c0ffee"
    assert hub_commit("org/set", "v1") == "v1"  # neither cached nor, offline, known: loading it will tell


def test_without_the_hub_the_error_says_how_to_get_the_data():
    with pytest.raises(UserError, match=r"^data\.path=no-such-org/no-such-set: is no path here.*hf download --repo-type dataset") as error:
        read("no-such-org/no-such-set")
    assert "\n" not in str(error.value)
