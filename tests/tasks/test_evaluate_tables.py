"""Rows computed from hand-made completions, and completions on disk. No model."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.completion_files import COMPLETIONS, Completion, part_file, read_completions, read_metadata, timed_on, write_completions
from tasks.evaluate.tables import Run, accepted_lengths, differences, row, runs_of
from tasks.stage import UserError


def completion(identity: int, lengths: list[int], seconds: float | None, **changes) -> Completion:
    """lengths: tokens committed by each forward."""
    values = {
        "id": identity,
        "method": "jacobi",
        "block_size": 8,
        "batch_size": 1,
        "batch": identity,
        "prompt_tokens": 5,
        "tokens": list(range(sum(lengths))),
        "text": f"text {identity}",
        "stop_reason": "eos",
        "forwards": len(lengths),
        "accepted_lengths": lengths,
        "seconds": seconds,
        "prefill_seconds": seconds and seconds / 4,
    }
    return Completion(**values | changes)


def ar(identity: int, tokens: int, seconds: float, **changes) -> Completion:
    return completion(identity, [1] * tokens, seconds, method="ar", block_size=1, **changes)


AR = Run([ar(0, 8, 4.0), ar(1, 12, 6.0), ar(2, 40, 20.0)])  # 2 tokens/s throughout


def test_totals_and_spread():
    ours = Run([completion(0, [4, 4], 1.0), completion(1, [6, 6], 1.0), completion(2, [20, 20], 5.0, stop_reason="length")])
    found = row(ours, {"ar": AR})
    assert (found["prompts"], found["tokens"], found["forwards"], found["seconds"]) == (3, 60, 6, 7.0)
    assert found["tpf"] == 10 and found["tps"] == pytest.approx(60 / 7) and found["speedup"] == pytest.approx(60 / 7 / 2)
    assert (found["tpf_median"], found["tps_median"], found["speedup_median"]) == (6, 8, 4)  # of 4, 6, 20; 8, 12, 8; half of those
    assert found["batches"] == 3 and all(
        found[f"{key}_{q}"] is None for key in ("tpf", "tps", "speedup") for q in ("q1", "q3")
    )  # of 3 there are none
    assert found["stop_reasons"] == {"eos": 2, "length": 1}  # capped answers count
    assert found["speedup_transformers"] is None and found["speedup_prompt_lookup"] is None
    theirs = Run([dataclasses.replace(c, method="transformers", seconds=2 * c.seconds) for c in AR.completions])
    assert row(ours, {"ar": AR, "transformers": theirs})["speedup_transformers"] == pytest.approx(60 / 7)


def test_quartiles_of_four_prompts():
    base = Run([*AR.completions, ar(3, 10, 5.0)])
    ours = Run([completion(0, [4, 4], 1.0), completion(1, [6, 6], 1.0), completion(2, [20, 20], 5.0), completion(3, [5, 5], 1.0)])
    found = row(ours, {"ar": base})
    assert (found["tpf_q1"], found["tpf_median"], found["tpf_q3"]) == (4.75, 5.5, 9.5)  # of 4, 6, 20, 5
    assert (found["tps_q1"], found["tps_median"], found["tps_q3"]) == (8, 9, 10.5)  # of 8, 12, 8, 10
    assert (found["speedup_q1"], found["speedup_median"], found["speedup_q3"]) == (4, 4.5, 5.25)


def test_prefill_in_and_out():
    ours = Run([completion(0, [4, 4], 2.0, prefill_seconds=1.0), completion(1, [12], 3.0, prefill_seconds=3.0), completion(2, [30, 5, 5], 5.0)])
    found = row(ours, {"ar": AR})
    assert found["prefill_seconds"] == pytest.approx(1 + 3 + 1.25)
    assert found["decode_tpf"] == pytest.approx((4 + 0 + 10) / (1 + 0 + 2))
    assert found["decode_tps"] == pytest.approx((4 + 10) / (1.0 + 3.75))  # the answer of one forward had nothing to decode
    ar_tps = (7 + 11 + 39) / (0.75 * 30)
    assert found["decode_speedup"] == pytest.approx(found["decode_tps"] / ar_tps)
    at_once = row(Run([completion(i, [n], 1.0) for i, n in enumerate((8, 12, 40))]), {"ar": AR})
    assert at_once["decode_tps"] is None and at_once["decode_tpf"] is None and at_once["decode_speedup"] is None


def test_loops_are_told_apart():
    loop = completion(2, [20, 20], 1.0, degenerate=True)
    found = row(Run([completion(0, [4, 4], 2.0), completion(1, [6, 6], 3.0), loop]), {"ar": AR})
    assert found["degenerate"] == 1
    assert found["sound_tpf"] == 5 and found["sound_speedup"] == pytest.approx(4 / 2)
    assert found["degenerate_tpf"] == 20 and found["degenerate_speedup"] == pytest.approx(40 / 2)
    assert found["tpf"] == 10  # what repetition has added to it
    every = row(Run([dataclasses.replace(c, degenerate=True) for c in AR.completions]), {"ar": AR})
    assert every["sound_tpf"] is None and every["sound_speedup"] is None and every["degenerate_tpf"] == 1


def test_a_batch_is_timed_as_one():
    base = Run([ar(i, 8, 2.0, batch_size=2, batch=i // 2) for i in range(4)])
    ours = Run([completion(i, [4, 4], s, batch_size=2, batch=i // 2) for i, s in enumerate((1.0, 1.0, 0.5, 0.5))])
    found = row(ours, {"ar": base})
    assert found["batch_size"] == 2 and found["tps"] == pytest.approx(32 / 3) and found["tpf"] == 4
    assert (found["prompts"], found["batches"]) == (4, 2)
    assert (found["tps_median"], found["tps_q1"]) == (12, None)  # of two batches, 8 and 16


def test_a_loop_in_a_batch_takes_the_whole_batch_with_it():
    """Prompt 0 goes token by token beside a loop that is guessed 16 at once: its share of the batch's time is no time of its own."""
    base = Run([ar(i, 32, 16.0, batch_size=2, batch=i // 2) for i in range(6)])
    slow, loop = completion(0, [1] * 32, 1.0), completion(1, [16, 16], 1.0, degenerate=True)
    sound = [completion(i, [4] * 8, 4.0) for i in (2, 3)]
    loops = [completion(i, [16, 16], 0.5, degenerate=True) for i in (4, 5)]
    batched = [dataclasses.replace(c, batch_size=2, batch=c.id // 2) for c in (slow, loop, *sound, *loops)]
    found = row(Run(batched), {"ar": base})
    assert found["sound_speedup"] == 4 and found["degenerate_speedup"] == 32  # batches 1 and 2; batch 0 is neither
    assert found["sound_tpf"] == pytest.approx(96 / (32 + 16)) and found["degenerate_tpf"] == 16  # a row's forwards are its own
    mixed = row(Run(batched[:2]), {"ar": Run(base.completions[:2])})
    assert mixed["sound_speedup"] is None and mixed["degenerate_speedup"] is None


def test_a_batch_decodes_as_long_as_its_longest_row():
    """Its time after the prefill is all of it, though a row that one forward answered has a share in it."""
    base = Run([ar(i, 10, 5.0, batch_size=2, batch=0, prefill_seconds=0.5) for i in range(2)])
    at_once, longer = completion(0, [10], 2.0, prefill_seconds=1.0), completion(1, [2, 4, 4], 2.0, prefill_seconds=1.0)
    found = row(Run([dataclasses.replace(c, batch_size=2, batch=0) for c in (at_once, longer)]), {"ar": base})
    assert found["decode_tps"] == 8 / 2 and found["decode_tpf"] == 8 / 2
    assert found["decode_speedup"] == pytest.approx(4 / (18 / 9))


def test_runs_come_smallest_batch_and_greedy_first():
    rows = [completion(0, [8], 1.0), completion(0, [8], 1.0, method="transformers", block_size=1), ar(0, 8, 1.0, batch_size=4), ar(0, 8, 1.0)]
    assert [r.setting for r in runs_of(rows)] == [("ar", 1, 1), ("jacobi", 8, 1), ("transformers", 1, 1), ("ar", 1, 4)]
    assert [r.is_ours for r in runs_of(rows)] == [True, True, False, True]


def test_differences_are_listed():
    wrong = completion(1, [6, 6], 1.0, first_difference=3, margin=0.5, difference="defect")
    run = Run([completion(0, [4, 4], 1.0), wrong, completion(2, [20, 20], 1.0)])
    assert row(run, {"ar": AR})["equals_ar"] == pytest.approx(2 / 3)
    where = {"problem_id": "p1", "method": "jacobi", "block_size": 8, "batch_size": 1}
    assert differences(run, lambda identity: f"p{identity}") == [{**where, "first_index": 3, "margin": 0.5, "kind": "defect"}]
    assert accepted_lengths(run) == {4: 2, 6: 2, 20: 2}


def test_completions_on_disk(tmp_path):
    rows = [completion(0, [4, 4], 1.0), completion(1, [], None, tokens=[]), completion(2, [1], 1.0, margin=0.25)]
    write_completions(part_file(tmp_path, "speed", 1), rows[2:], metadata={"machine": {"cpu": "x", "gpus": []}})
    write_completions(part_file(tmp_path, "speed", 0), rows[:2], metadata={"machine": {"cpu": "x", "gpus": []}})
    assert list(read_completions(tmp_path, "speed")) == rows and list(read_completions(tmp_path, "answers")) == []
    assert read_metadata(part_file(tmp_path, "speed", 0)) == {"machine": {"cpu": "x", "gpus": []}} and timed_on(tmp_path) == {"cpu": "x", "gpus": []}
    newer = COMPLETIONS.with_metadata({**COMPLETIONS.metadata, b"schema_version": b"2"})
    pq.write_table(pa.Table.from_pylist([], schema=newer), part_file(tmp_path, "speed", 2))
    with pytest.raises(UserError, match=r"speed-000002\.parquet: holds completions version 2"):
        list(read_completions(tmp_path, "speed"))


def test_import_is_light():
    check = "import sys, tasks.evaluate.stage, tasks.search_decoding; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
