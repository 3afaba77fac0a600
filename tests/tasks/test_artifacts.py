"""Every stage file: what is written is what is read, and a file that is not what it should be is refused by name."""

from __future__ import annotations

import hashlib
import json

import pyarrow.parquet as pq
import pytest

from tasks import artifacts, trajectory_files
from tasks.artifacts import Prompt, prompt_id
from tasks.stage import UserError
from tests.tasks.tiny_stage import hand_trajectory, plain

MESSAGES = [{"role": "system", "content": "Sei kurz. 日本"}, {"role": "user", "content": '\tfor x in a: \r\n  🙂 \\ " \u2028 ok  '}]


def prompts() -> list[Prompt]:
    """Ragged on purpose: no tokens, one, many; the largest id."""
    return [
        Prompt(3, "train", MESSAGES, [5, 6, 7], {"problem_set": "p", "tests": "assert f('\t\r\n🙂')", "solution": None}),
        Prompt(2**63 - 1, "test", MESSAGES[1:], [], {"problem_set": "p"}),
        Prompt(1, "train", MESSAGES[1:], list(range(300)), {"problem_set": "p", "nested": {"a": [1, 2.5]}}),
    ]


def trajectories():
    """Two blocks with a short last one; an answer shorter than a block; one block converged at once."""
    return [
        hand_trajectory(7, [5, 6, 7, 8, 9], block_size=3, unconverged=[[3, 1, 0], [2, 0]]),
        hand_trajectory(2**63 - 1, [40], block_size=3, unconverged=[[1, 0]], prompt=(30,)),
        hand_trajectory(9, [11, 12, 13], block_size=3, unconverged=[[0]], prompt=tuple(range(20, 90))),
    ]


# ---- prompts


def test_prompts_round_trip_by_split_in_order(tmp_path):
    artifacts.write_prompts(tmp_path, prompts())
    assert artifacts.read_prompts(tmp_path, "train") == [prompts()[0], prompts()[2]]
    assert artifacts.read_prompts(tmp_path, "test") == [prompts()[1]]
    assert artifacts.read_prompts(tmp_path, "validation") == []


def test_a_single_prompt_round_trips(tmp_path):
    artifacts.write_prompts(tmp_path, prompts()[:1])
    assert artifacts.read_prompts(tmp_path, "train") == prompts()[:1]


def test_prompt_ids_are_the_first_63_bits_of_a_sha256():
    text = '[{"content": "héllo", "role": "user"}]'
    expected = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) >> 1
    assert prompt_id([{"role": "user", "content": "héllo"}]) == expected == 567110966781526661
    assert prompt_id([{"content": "héllo", "role": "user"}]) == expected  # key order says nothing
    ids = {prompt_id([{"role": "user", "content": f"{i}"}]) for i in range(500)}
    assert len(ids) == 500 and min(ids) >= 0 and 2**62 < max(ids) < 2**63


# ---- trajectories


def test_trajectories_round_trip_over_parts(tmp_path):
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 1), trajectories()[2:])
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 0), trajectories()[:2])
    assert [plain(t) for t in trajectory_files.read_trajectories(tmp_path)] == [plain(t) for t in trajectories()]


@pytest.mark.parametrize("index", range(3))
def test_a_single_trajectory_round_trips(tmp_path, index):
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 0), [trajectories()[index]])
    (found,) = trajectory_files.read_trajectories(tmp_path)
    assert plain(found) == plain(trajectories()[index])
    found.validate()


def test_a_part_of_a_shard_without_a_good_row_is_empty(tmp_path):
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 0), [])
    assert list(trajectory_files.read_trajectories(tmp_path)) == []


def test_an_id_in_two_parts_is_refused(tmp_path):
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 0), trajectories())
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 1), trajectories()[:1])
    with pytest.raises(UserError, match=r"part-000001\.parquet: prompt id 7 stands in two parts"):
        list(trajectory_files.read_trajectories(tmp_path))


def test_unfinished_files_are_ignored(tmp_path):
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 0), trajectories())
    (tmp_path / ".part-000001.parquet.4711.tmp").write_bytes(b"half a file")
    assert len(list(trajectory_files.read_trajectories(tmp_path))) == 3


def test_a_write_that_dies_leaves_the_old_file(tmp_path, monkeypatch):
    path = trajectory_files.trajectory_part(tmp_path, 0)
    trajectory_files.write_trajectories(path, trajectories())
    artifacts.write_json(tmp_path / "a.json", {"old": True})
    before = path.read_bytes()

    def die(table, where, **_):
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", die)
    monkeypatch.setattr(artifacts.os, "fsync", lambda _: die(None, tmp_path / "scratch"))
    with pytest.raises(OSError, match="disk full"):
        trajectory_files.write_trajectories(path, trajectories()[:1])
    with pytest.raises(OSError, match="disk full"):
        artifacts.write_json(tmp_path / "a.json", {"new": True})
    assert path.read_bytes() == before
    assert artifacts.read_json(tmp_path / "a.json") == {"old": True}


# ---- files that are not what they should be


def wrong_files(path):
    """Ways to spoil a good Parquet file, each with what the message must say."""
    table = pq.read_table(path)
    good = path.read_bytes()

    def relabel(**changes):
        metadata = {k.decode(): v.decode() for k, v in table.schema.metadata.items()} | changes
        pq.write_table(table.replace_schema_metadata(metadata), path)

    yield lambda: relabel(schema_version="999"), "version 999, expected .* version [12]"
    yield lambda: relabel(artifact="something"), "holds something version [12]"
    yield lambda: pq.write_table(table.replace_schema_metadata(None), path), "holds None"
    yield lambda: path.write_bytes(good[: len(good) // 2]), "not a readable Parquet file"
    yield lambda: path.write_bytes(b""), "not a readable Parquet file"
    yield lambda: path.write_bytes(b"PAR1 but not really PAR1"), "not a readable Parquet file"
    yield lambda: path.unlink(), "not a readable Parquet file"


@pytest.mark.parametrize("kind", ["prompts", "part-000000"])
def test_a_wrong_file_is_refused_by_name(tmp_path, kind):
    path = tmp_path / f"{kind}.parquet"
    artifacts.write_prompts(tmp_path, prompts())
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 0), trajectories())
    read = {
        "prompts": lambda: artifacts.read_prompts(tmp_path, "train"),
        "part-000000": lambda: list(trajectory_files.read_trajectories(tmp_path)),
    }[kind]
    good = path.read_bytes()
    for spoil, says in wrong_files(path):
        spoil()
        if kind == "part-000000" and not path.exists():
            continue  # a missing part is missing prompts: the trajectories stage counts them
        with pytest.raises(UserError, match=says) as error:
            read()
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        path.write_bytes(good)
    assert read() is not None


def test_one_artifact_is_not_taken_for_another(tmp_path):
    artifacts.write_prompts(tmp_path, prompts())
    (tmp_path / "prompts.parquet").rename(trajectory_files.trajectory_part(tmp_path, 0))
    with pytest.raises(UserError, match="holds prompts version 1, expected trajectories version 2"):
        list(trajectory_files.read_trajectories(tmp_path))


def test_rotten_bytes_in_the_middle_of_a_file_are_noticed(tmp_path):
    artifacts.write_prompts(tmp_path, prompts())
    path = tmp_path / "prompts.parquet"
    raw = bytearray(path.read_bytes())
    raw[8:200] = b"\xff" * 192
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"prompts\.parquet: not a readable Parquet file"):
        artifacts.read_prompts(tmp_path, "train")


@pytest.mark.parametrize("raw", [None, b"", b"{", b'{"a": "\xff"}'])
def test_a_broken_json_file_is_refused_by_name(tmp_path, raw):
    path = tmp_path / "x.json"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(UserError, match=r"x\.json: not a readable JSON file"):
        artifacts.read_json(path)


def test_json_keeps_text(tmp_path):
    value = {"t": "\r\n\t🙂 ", "n": [1, None, 0.1]}
    artifacts.write_json(tmp_path / "x.json", value)
    assert artifacts.read_json(tmp_path / "x.json") == value == json.loads((tmp_path / "x.json").read_bytes())
    artifacts.write_text(tmp_path / "x.txt", "a\r\nb\n")
    assert (tmp_path / "x.txt").read_bytes() == b"a\r\nb\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.txt"]
