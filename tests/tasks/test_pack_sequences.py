"""Trajectories to rows: every sample once, the noise that was asked for or a word about it, the same bytes again."""

from __future__ import annotations

import logging

import pytest

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import Kind
from tasks import artifacts, trajectory_files
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
from tasks.pack_sequences import PackConfig, run
from tasks.stage import StageContext, UserError
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


def pack(trajectories, output, *, max_length=512, **schedule):
    """(metrics, rows)."""
    output.mkdir()
    config = PackConfig(max_length=max_length, schedule=NoiseSchedule(**schedule))
    metrics = run(config, {"trajectories": trajectories}, output, StageContext())
    return metrics, artifacts.PackedRows(output / "packed.parquet")


def samples(rows):
    """(prompt, clean answer) of every sample, in order."""
    found = []
    for row in (rows[i] for i in range(len(rows))):
        for number in range(int(row.sample.max()) + 1):
            of_it = row.sample == number
            found.append(tuple(row.input_ids[of_it & (row.kind == kind)].tolist() for kind in (Kind.PROMPT, Kind.CLEAN)))
    return found


@pytest.mark.parametrize(
    ("max_length", "expected", "dropped"),
    [(512, [36], 0), (36, [36], 0), (35, [30, 6], 0), (30, [30, 6], 0), (29, [18, 18], 0), (18, [18, 18], 0), (17, [12, 6], 1), (6, [6], 2)],
)
def test_rows_are_filled_in_order_and_too_long_samples_counted(tmp_path, max_length, expected, dropped):
    metrics, rows = pack(by_hand(tmp_path / "t"), tmp_path / "out", max_length=max_length, window=1)
    assert rows.lengths.tolist() == expected
    assert metrics["rows"] == len(rows) and metrics["samples"] == 3 - dropped and metrics["dropped_too_long"] == dropped
    assert metrics["tokens"] == sum(expected)
    assert metrics["fill_ratio"] == pytest.approx(sum(expected) / (len(expected) * max_length))


@pytest.mark.parametrize("max_length", [40, 100, 512])
def test_no_sample_is_lost_or_doubled(tmp_path, trajectories, max_length):
    everything = [(t.prompt_ids.tolist(), t.answer_ids.tolist()) for t in trajectory_files.read_trajectories(trajectories)]
    fitting = [(p, a) for p, a in everything if len(p) + 2 * len(a) <= max_length]
    if not fitting:
        with pytest.raises(UserError, match=rf"^pack\.max_length={max_length}: all 11 samples are longer"):
            pack(trajectories, tmp_path / "out", max_length=max_length, window=2)
        return
    metrics, rows = pack(trajectories, tmp_path / "out", max_length=max_length, window=2)
    assert samples(rows) == fitting
    assert metrics["dropped_too_long"] == len(everything) - len(fitting)
    assert metrics["ar_tokens"] == sum(len(a) for _, a in fitting) == int(rows.ar_tokens.sum())
    assert metrics["consistency_tokens"] == int(rows.consistency_tokens.sum()) > 0
    assert max(rows.lengths) <= max_length


def test_the_histogram_is_the_hand_count(tmp_path):
    # linear, window 2: the first block of each answer is clean (0/4, 0/4, 0/2), the second as noisy as it was ever (4/4, 1/1)
    metrics, _ = pack(by_hand(tmp_path / "t"), tmp_path / "linear", window=2)
    assert artifacts.read_json(tmp_path / "linear" / "noise.json") == {"edges": [i / 10 for i in range(11)], "counts": [3, *[0] * 9, 2]}
    assert metrics["noise_ratio_mean"] == pytest.approx(2 / 5) and metrics["noise_ratio_max"] == 1.0
    # window 1 at a ratio of 0.5: targets 2 of 4, 2 of 4, 2 of 4, 1 of 1, 1 of 2; nearest recorded: 3/4, 2/4, 3/4, 1/1, 1/2
    metrics, _ = pack(by_hand(tmp_path / "t"), tmp_path / "half", window=1, t_max=0.5)
    assert artifacts.read_json(tmp_path / "half" / "noise.json")["counts"] == [0, 0, 0, 0, 0, 2, 0, 0, 2, 0, 1]
    assert metrics["noise_ratio_mean"] == pytest.approx((0.75 + 0.5 + 0.75 + 1 + 0.5) / 5)


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


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="^max_length must be at least 1, got 0"):
        PackConfig(max_length=0)
