"""Packed rows: what is written is what is read, by row number, from any thread; a file that is not what it should be is refused by name."""

from __future__ import annotations

import errno
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest
import torch

from jacobi_core.distillation.losses import loss_counts
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import PackedRow, batch_rows, join_samples, pack_trajectory
from tasks import packed_files
from tasks.artifacts import read_table
from tasks.packed_files import PACKED, TOKEN_FIELDS, PackedRows, write_packed
from tasks.stage import UserError
from tests.tasks.tiny_stage import hand_trajectory

SCHEDULE = NoiseSchedule(window=2)


def packed_rows() -> list[PackedRow]:
    """Three rows of different lengths, one of two samples."""
    first, second, third = (
        pack_trajectory(t, SCHEDULE)[0]
        for t in (
            hand_trajectory(7, [5, 6, 7, 8, 9], block_size=3, unconverged=[[3, 1, 0], [2, 0]]),
            hand_trajectory(8, [40], block_size=3, unconverged=[[1, 0]], prompt=(30,)),
            hand_trajectory(9, [11, 12, 13], block_size=3, unconverged=[[0]], prompt=tuple(range(20, 90))),
        )
    )
    return [join_samples([first, second]), third, second]


@pytest.fixture
def many(tmp_path, monkeypatch):
    """(rows, the file that holds them in row groups of one to three)."""
    monkeypatch.setattr(packed_files, "GROUP_TOKENS", 80)
    rows = packed_rows() * 7
    write_packed(tmp_path / "packed.parquet", iter(rows), schedule=SCHEDULE, max_length=100)
    assert pq.ParquetFile(tmp_path / "packed.parquet").num_row_groups == 8
    return rows, tmp_path / "packed.parquet"


def same(found: PackedRow, expected: PackedRow) -> bool:
    return all(
        getattr(found, name).dtype == torch.long and getattr(found, name).tolist() == getattr(expected, name).tolist() for name in TOKEN_FIELDS
    )


def test_rows_are_read_in_any_order_and_more_than_once(many):
    rows, path = many
    found = PackedRows(path)
    assert len(found) == len(rows) and found.window == 2 and found.max_length == 100
    assert found.lengths.tolist() == [len(r) for r in rows] and len(set(found.lengths.tolist())) == 3
    assert [found.consistency_tokens.tolist(), found.ar_tokens.tolist()] == torch.stack([loss_counts(r) for r in rows], 1).tolist()
    order = list(range(len(rows))) * 2
    random.Random(0).shuffle(order)
    assert all(same(row, rows[index]) for row, index in zip(found.read(order), order, strict=True))
    for index in order:
        (row,) = found.read([index])
        assert same(row, rows[index]), index
        row.input_ids.fill_(-5)  # a row belongs to its reader
    assert found.read([]) == []
    with pytest.raises(AssertionError):
        found.read([len(rows)])


def test_only_the_row_groups_needed_are_decoded(many, monkeypatch):
    _, path = many
    found, decoded = PackedRows(path), []
    read_group = PackedRows._read_group
    monkeypatch.setattr(PackedRows, "_read_group", lambda self, group: decoded.append(group) or read_group(self, group))
    found.read([19, 0, 18, 1])
    assert decoded == [0, 6]


def test_threads_may_read_at_once(many):
    rows, path = many
    found, generator = PackedRows(path), random.Random(1)
    asked = [[generator.randrange(len(rows)) for _ in range(4)] for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        for numbers, read in zip(asked, pool.map(found.read, asked), strict=True):
            assert all(same(row, rows[number]) for number, row in zip(numbers, read, strict=True))


def test_a_writer_holds_one_row_group(many, tmp_path):
    rows, _ = many
    written = []

    def stream():
        for row in rows:
            yield row
            written.append(os.path.getsize(next(tmp_path.glob(".again.parquet.*"))))

    write_packed(tmp_path / "again.parquet", stream(), schedule=SCHEDULE, max_length=100)
    assert len(set(written)) >= 7  # the file grows while rows come in


def test_a_write_that_dies_leaves_the_old_file(many):
    rows, path = many
    before = path.read_bytes()

    def dying():
        yield from rows
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_packed(path, dying(), schedule=SCHEDULE, max_length=100)
    assert path.read_bytes() == before and [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("max_length", "bucket"), [(1, 64), (100, 64), (512, 64), (513, 128), (1000, 128), (2048, 256), (16_384, 2048)])
def test_a_bucket_leaves_at_most_eight_shapes(tmp_path, max_length, bucket):
    write_packed(tmp_path / "packed.parquet", packed_rows()[2:], schedule=SCHEDULE, max_length=max_length)
    found = PackedRows(tmp_path / "packed.parquet")
    assert found.bucket == bucket
    (row,) = found.read([0])
    shapes = {-(-length // bucket) for length in range(1, max_length + 1)}
    assert len(shapes) <= 8 and batch_rows([row], multiple_of=bucket).input_ids.shape == (1, bucket)


def test_a_file_without_rows_is_read(tmp_path):
    write_packed(tmp_path / "packed.parquet", [], schedule=SCHEDULE, max_length=64)
    found = PackedRows(tmp_path / "packed.parquet")
    assert len(found) == 0 and found.lengths.tolist() == [] and found.read([]) == []


def test_the_file_says_what_it_was_packed_with(many):
    _, path = many
    metadata = {k.decode(): v.decode() for k, v in pq.ParquetFile(path).schema_arrow.metadata.items()}
    assert metadata["artifact"] == "packed" and metadata["schema_version"] == "2" and metadata["max_length"] == "100"
    assert NoiseSchedule(**json.loads(metadata["schedule"])) == SCHEDULE


def wrong_files(path):
    """Ways to spoil a good file, each with what the message must say."""
    table, good = read_table(path, PACKED), path.read_bytes()

    def relabel(**changes):
        metadata = {k.decode(): v.decode() for k, v in table.schema.metadata.items()} | changes
        pq.write_table(table.replace_schema_metadata(metadata), path)

    yield lambda: relabel(schema_version="1"), "holds packed version 1, expected packed version 2"
    yield lambda: relabel(artifact="something"), "holds something version 2"
    yield lambda: pq.write_table(table.replace_schema_metadata(None), path), "holds None"
    yield lambda: relabel(schedule="{"), "not a readable packed file"
    yield lambda: relabel(schedule="{}"), "not a readable packed file"
    yield lambda: relabel(max_length="long"), "not a readable packed file"
    yield lambda: path.write_bytes(good[: len(good) // 2]), "not a readable Parquet file"
    yield lambda: path.write_bytes(b""), "not a readable Parquet file"
    yield lambda: path.unlink(), "not a readable Parquet file"


def test_a_wrong_file_is_refused_by_name(many):
    _, path = many
    good = path.read_bytes()
    for spoil, says in wrong_files(path):
        spoil()
        with pytest.raises(UserError, match=says) as error:
            PackedRows(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        path.write_bytes(good)
    assert len(PackedRows(path)) == 21


@pytest.mark.parametrize("at_the_start", [True, False])
def test_a_disk_that_fails_while_rows_are_read_is_no_broken_file(many, monkeypatch, at_the_start):
    """It passes as it is, so that whoever restarts workers tries again."""
    _, path = many
    found = PackedRows(path)

    class Failing(pq.ParquetFile):
        def read(self, **_):
            raise OSError(errno.EIO, "Input/output error")

        def read_row_group(self, *_, **__):
            raise OSError(errno.EIO, "Input/output error")

    if at_the_start:
        monkeypatch.setattr(packed_files, "open_table", lambda path, schema: Failing(path))
    else:
        found._file = Failing(path)
    with pytest.raises(OSError, match="Input/output error") as error:
        PackedRows(path) if at_the_start else found.read([0])
    assert error.value.errno == errno.EIO


def test_rotten_bytes_are_noticed_when_they_are_read(many):
    _, path = many
    raw = bytearray(path.read_bytes())
    raw[8:120] = b"\xff" * 112
    path.write_bytes(raw)
    found = PackedRows(path)
    with pytest.raises(UserError, match=r"packed\.parquet: not a readable packed file"):
        found.read([0])
    assert same(found.read([20])[0], packed_rows()[2])
