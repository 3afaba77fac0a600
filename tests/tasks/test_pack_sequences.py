"""Trajectories to rows: every sample once, the noise that was asked for or a word about it, the same bytes again."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import IGNORE, Kind
from tasks import artifacts, trajectory_files
from tasks.distill.start_checks import check_rows
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
from tasks.pack_sequences import PackConfig, Packer, TooLong, best_fit, run
from tasks.packed_files import PackedRows
from tasks.stage import StageContext, UserError
from tests.core.tiny import tiny_model
from tests.tasks.tiny_stage import collect_shards, hand_trajectory

N = 4


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory, prompts_folder, base_folder):
    """Of the tiny model: answers of many lengths."""
    folder = tmp_path_factory.mktemp("stages") / "trajectories"
    config = GenerateTrajectoriesConfig(block_size=N, max_new_tokens=18, shard_size=4)
    collect_shards(config, {"prompts": prompts_folder, "model": base_folder}, folder, range(3))
    return folder


def by_hand(folder):
    """Three samples of 2 + 2 * answer tokens: 18, 12 and 6."""
    made = [
        hand_trajectory(1, [5, 6, 7, 8, 9, 10, 11, 12], block_size=N, unconverged=[[4, 3, 0], [4, 2, 1, 0]]),
        hand_trajectory(2, [5, 6, 7, 8, 9], block_size=N, unconverged=[[3, 0], [1, 0]]),
        hand_trajectory(3, [5, 6], block_size=N, unconverged=[[1, 0]]),
    ]
    folder.mkdir(exist_ok=True)
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(folder, 0), made)
    return folder


def pack(trajectories, output, *, max_length=512, too_long="drop", **schedule):
    """(metrics, rows)."""
    output.mkdir()
    config = PackConfig(max_length=max_length, too_long=too_long, schedule=NoiseSchedule(**schedule))
    metrics = run(config, {"trajectories": trajectories}, output, StageContext())
    return metrics, PackedRows(output / "packed.parquet")


def samples(rows):
    """(prompt, clean answer) of every sample, in order."""
    found = []
    for row in rows.read(range(len(rows))):
        for number in range(int(row.sample.max()) + 1):
            of_it = row.sample == number
            found.append(tuple(row.input_ids[of_it & (row.kind == kind)].tolist() for kind in (Kind.PROMPT, Kind.CLEAN)))
    return found


# ---- rows


@settings(max_examples=300, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), max_length=st.integers(20, 60), open_rows=st.integers(1, 6))
def test_best_fit_loses_and_doubles_nothing(lengths, max_length, open_rows):
    made = [(number,) * length for number, length in enumerate(lengths)]
    pulled, open_now = [], []

    def stream():
        for sample in made:
            pulled.append(sample)
            yield sample

    rows = []
    for row in best_fit(stream(), max_length=max_length, open_rows=open_rows):
        rows.append(row)
        open_now.append(sum(map(len, pulled)) - sum(len(s) for r in rows for s in r))
    assert sorted(sample for row in rows for sample in row) == made
    assert all(0 < sum(map(len, row)) <= max_length for row in rows)
    assert max(open_now, default=0) <= (open_rows + 1) * max_length  # what is held, in tokens
    assert rows == list(best_fit(made, max_length=max_length, open_rows=open_rows))


def test_best_fit_by_hand():
    def rows(lengths, *, open_rows):
        return [[len(s) for s in row] for row in best_fit([" " * n for n in lengths], max_length=10, open_rows=open_rows)]

    assert rows([6, 5, 4, 5], open_rows=2) == [[6, 4], [5, 5]]
    assert rows([5, 6, 4, 5], open_rows=2) == [[6, 4], [5, 5]]  # the fullest that it fits, not the first
    assert rows([7, 8, 9, 3], open_rows=2) == [[8], [7, 3], [9]]  # 9 opens a third row, so the fullest is closed
    assert rows([6, 6, 4], open_rows=2) == [[6, 4], [6]]  # of equals the oldest
    assert rows([6, 5, 4], open_rows=1) == [[6], [5, 4]]
    assert rows([10, 3], open_rows=1) == [[10], [3]]  # a full row is no longer open
    assert rows([], open_rows=1) == []


def test_best_fit_fills_rows():
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(5.5, 0.5, 3000), 30, 2048).astype(int)
    rows = list(best_fit([range(n) for n in lengths], max_length=2048))
    assert lengths.sum() / (len(rows) * 2048) > 0.97


@pytest.mark.parametrize(
    ("max_length", "expected", "dropped", "dropped_tokens"),
    [
        (512, [36], 0, 0),
        (36, [36], 0, 0),
        (35, [30, 6], 0, 0),
        (30, [30, 6], 0, 0),
        (29, [24, 12], 0, 0),
        (18, [18, 18], 0, 0),
        (17, [12, 6], 1, 8),
        (6, [6], 2, 13),
    ],
)
def test_rows_are_filled_and_too_long_samples_counted(tmp_path, max_length, expected, dropped, dropped_tokens):
    metrics, rows = pack(by_hand(tmp_path / "t"), tmp_path / "out", max_length=max_length, window=1)
    assert rows.lengths.tolist() == expected
    assert metrics["rows"] == len(rows) and metrics["samples"] == 3 - dropped and metrics["dropped_samples"] == dropped
    assert metrics["dropped_answer_tokens"] == dropped_tokens and metrics["split_samples"] == 0
    assert metrics["tokens"] == sum(expected)
    assert metrics["fill_ratio"] == pytest.approx(sum(expected) / (len(expected) * max_length))
    padded = sum(-(-length // rows.bucket) * rows.bucket for length in expected)
    assert metrics["padding_share"] == pytest.approx(1 - sum(expected) / padded)


@pytest.mark.parametrize("max_length", [40, 100, 512])
def test_no_sample_is_lost_or_doubled(tmp_path, trajectories, max_length):
    everything = [(t.prompt_ids.tolist(), t.answer_ids.tolist()) for t in trajectory_files.read_trajectories(trajectories)]
    fitting = [(p, a) for p, a in everything if len(p) + 2 * len(a) <= max_length]
    if not fitting:
        with pytest.raises(UserError, match=rf"^pack\.max_length={max_length}: all 11 samples are longer"):
            pack(trajectories, tmp_path / "out", max_length=max_length, window=2)
        return
    metrics, rows = pack(trajectories, tmp_path / "out", max_length=max_length, window=2)
    assert sorted(samples(rows)) == sorted(fitting)
    assert metrics["dropped_samples"] == len(everything) - len(fitting)
    assert metrics["ar_tokens"] == sum(len(a) for _, a in fitting) == int(rows.ar_tokens.sum())
    assert metrics["consistency_tokens"] == int(rows.consistency_tokens.sum()) > 0
    assert max(rows.lengths) <= max_length


def test_samples_longer_than_a_row_are_split_and_counted(tmp_path):
    """Window 1, n=4, prompt 2: the windows of the first sample take 10 and 14 tokens, of the second 10 and 8, the third is 6 long."""
    whole, _ = pack(by_hand(tmp_path / "t"), tmp_path / "whole", window=1)
    metrics, rows = pack(by_hand(tmp_path / "t"), tmp_path / "14", window=1, max_length=14, too_long="split")
    assert sorted(rows.lengths.tolist()) == [6, 10, 12, 14]
    assert (metrics["samples"], metrics["split_samples"], metrics["dropped_samples"], metrics["dropped_answer_tokens"]) == (3, 1, 0, 0)
    for name in ("ar_tokens", "consistency_tokens", "noise_ratio_mean", "noise_ratio_max"):
        assert metrics[name] == whole[name], name
    assert artifacts.read_json(tmp_path / "14" / "noise.json") == artifacts.read_json(tmp_path / "whole" / "noise.json")
    # at 11 tokens the first sample's second window no longer fits behind its context; the second sample is cut in two
    metrics, rows = pack(by_hand(tmp_path / "t"), tmp_path / "11", window=1, max_length=11, too_long="split")
    # of the second the last token, alone in its window, has no loss of its own; the piece before it predicts it, so nothing is dropped.
    # of the first three tokens are: the one that its lost window begins with is predicted
    assert sorted(rows.lengths.tolist()) == [6, 10, 10]
    assert (metrics["samples"], metrics["split_samples"], metrics["dropped_samples"], metrics["dropped_answer_tokens"]) == (3, 2, 0, 3)
    assert sum(artifacts.read_json(tmp_path / "11" / "noise.json")["counts"]) == 3
    # at 9 nothing of the first two fits but the second's last token
    metrics, rows = pack(by_hand(tmp_path / "t"), tmp_path / "9", window=1, max_length=9, too_long="split")
    assert rows.lengths.tolist() == [6]
    assert (metrics["samples"], metrics["split_samples"], metrics["dropped_samples"], metrics["dropped_answer_tokens"]) == (1, 0, 2, 13)
    with pytest.raises(UserError, match=r"^pack\.max_length=5: all 3 samples are longer"):
        pack(by_hand(tmp_path / "t"), tmp_path / "5", window=1, max_length=5, too_long="split")


@settings(max_examples=100, deadline=None)
@given(
    answers=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    window=st.integers(1, 3),
    max_length=st.integers(4, 40),
    too_long=st.sampled_from(TooLong),
    t_max=st.sampled_from([0.0, 1.0]),
)
def test_every_row_has_a_loss_and_every_answer_token_is_predicted_once_or_dropped(answers, window, max_length, too_long, t_max):
    """Else check_rows refuses the file before training."""
    packer = Packer(PackConfig(max_length=max_length, too_long=too_long, schedule=NoiseSchedule(window=window, t_max=t_max)))
    made = [
        hand_trajectory(i, [5] * length, block_size=N, unconverged=[[min(N, length - at), 0] for at in range(0, length, N)])
        for i, length in enumerate(answers)
    ]
    rows = list(packer.rows(made))
    losses = [((row.labels != IGNORE).sum(), (row.teacher >= 0).sum()) for row in rows]
    assert all(ar + consistency > 0 for ar, consistency in losses)
    assert sum(int(ar) for ar, _ in losses) + packer.dropped_tokens == sum(answers)
    assert packer.samples + packer.dropped_samples == len(answers)


def test_rows_of_split_samples_can_be_trained_on(tmp_path):
    for max_length in range(6, 16):
        _, rows = pack(by_hand(tmp_path / "t"), tmp_path / str(max_length), window=1, max_length=max_length, too_long="split")
        check_rows(tmp_path / str(max_length) / "packed.parquet", rows, tiny_model())


# ---- what the schedule really produced


def test_the_histograms_are_the_hand_count(tmp_path):
    # linear, window 2: the first block of each answer is clean (0/4, 0/4, 0/2), the second as noisy as it was ever (4/4, 1/1)
    metrics, _ = pack(by_hand(tmp_path / "t"), tmp_path / "linear", window=2)
    assert artifacts.read_json(tmp_path / "linear" / "noise.json") == {
        "edges": [i / 10 for i in range(11)],
        "counts": [3, *[0] * 9, 2],
        "by_window_position": [[3, *[0] * 10], [*[0] * 10, 2]],
    }
    assert metrics["noise_ratio_mean"] == pytest.approx(2 / 5) and metrics["noise_ratio_max"] == 1.0
    # window 1 at a ratio of 0.5: targets 2 of 4, 2 of 4, 2 of 4, 1 of 1, 1 of 2; nearest recorded: 3/4, 2/4, 3/4, 1/1, 1/2
    metrics, _ = pack(by_hand(tmp_path / "t"), tmp_path / "half", window=1, t_max=0.5)
    noise = artifacts.read_json(tmp_path / "half" / "noise.json")
    assert noise["counts"] == [0, 0, 0, 0, 0, 2, 0, 0, 2, 0, 1] and noise["by_window_position"] == [noise["counts"]]
    assert metrics["noise_ratio_mean"] == pytest.approx((0.75 + 0.5 + 0.75 + 1 + 0.5) / 5)


def test_loss_tokens_per_row_are_told(tmp_path):
    metrics, rows = pack(by_hand(tmp_path / "t"), tmp_path / "out", max_length=18, window=1)
    # all noise: 18 = 4 + 3 consistency and 8 AR tokens; 12 + 6 = (3 + 0) + 1 - 1 (its last token predicts nothing) and 5 + 2
    assert sorted(rows.ar_tokens.tolist()) == [7, 8] and sorted(rows.consistency_tokens.tolist()) == [3, 7]
    assert (metrics["ar_per_row_min"], metrics["ar_per_row_max"], metrics["ar_per_row_mean"]) == (7, 8, 7.5)
    assert (metrics["consistency_per_row_min"], metrics["consistency_per_row_max"], metrics["consistency_per_row_mean"]) == (3, 7, 5.0)


def test_an_empty_set_is_refused(tmp_path):
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(tmp_path, 0), [])
    with pytest.raises(UserError, match=rf"^{tmp_path}: holds not one trajectory to pack"):
        pack(tmp_path, tmp_path / "out", window=1)


def test_a_set_without_noise_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^noise_schedule: .* not one noisy token"):
        pack(by_hand(tmp_path / "t"), tmp_path / "out", window=1, t_max=0.0)
    with pytest.raises(UserError, match=r"^noise_schedule: .* not one noisy token"):
        pack(by_hand(tmp_path / "t"), tmp_path / "out2", window=100)  # targets 0/4 and 4/99, and 0/1


def test_a_window_longer_than_the_answers_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        metrics, _ = pack(by_hand(tmp_path / "t"), tmp_path / "long", window=4)
    assert metrics["noise_ratio_max"] < 0.9
    assert [r.getMessage() for r in caplog.records] == [
        "the noisiest packed block has a noise ratio of 0.25, below t_max=1.00: is the window longer than the answers?"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        pack(by_hand(tmp_path / "t"), tmp_path / "fits", window=2)
    assert not caplog.records


def test_the_same_input_gives_the_same_bytes_and_another_schedule_touches_no_trajectory(tmp_path, trajectories):
    def snapshot():
        return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in trajectories.iterdir()}

    before = snapshot()
    pack(trajectories, tmp_path / "a", window=1, kind="random")
    pack(trajectories, tmp_path / "b", window=1, kind="random")
    pack(trajectories, tmp_path / "c", window=2, kind="reverse")
    assert snapshot() == before
    for name in ("packed.parquet", "noise.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()


def test_what_one_s_own_schedule_does_wrong_late_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "late_schedule.py").write_text("def late(*, num_blocks, sample_id, **_):\n    return [0.5] * (num_blocks if sample_id < 3 else 9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_schedule", raising=False)
    with pytest.raises(UserError, match=r"^noise_schedule=late_schedule:late: gave 9 noise ratios for 1 blocks$"):
        pack(by_hand(tmp_path / "t"), tmp_path / "out", kind="late_schedule:late")
    assert not list((tmp_path / "out").iterdir())


def test_packing_is_a_stream():
    """Rows come out while trajectories go in: what is held does not grow with their number."""
    pulled = []

    def stream():
        for number in range(2000):
            pulled.append(number)
            yield hand_trajectory(number, [5, 6, 7], block_size=N, unconverged=[[2, 0]])  # 8 tokens

    held, samples = 0, 0
    for row in Packer(PackConfig(max_length=24, schedule=NoiseSchedule(window=1))).rows(stream()):
        samples += int(row.sample.max()) + 1
        held = max(held, len(pulled) - samples)
    assert samples == 2000 and held < 200


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="^max_length must be at least 1, got 0"):
        PackConfig(max_length=0)
    with pytest.raises(ValueError, match="'keep' is not a valid TooLong"):
        PackConfig(too_long="keep")
