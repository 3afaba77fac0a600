"""Shards to files: every prompt once, the same bytes in any order and after any interruption, one bad row costs one row. No Ray here."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.hub import load_model, load_tokenizer
from jacobi_core.trajectories.collect import collect
from jacobi_core.trajectories.quality import REASONS
from tasks import artifacts, pack_sequences
from tasks.generate_trajectories import plan
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
from tasks.generate_trajectories.stage import make_job, run
from tasks.generate_trajectories.worker import ShardWorker
from tasks.pack_sequences import PackConfig
from tasks.stage import StageContext, UserError
from tasks.trajectory_files import read_trajectories, trajectory_part, write_trajectories
from tests.tasks.tiny_stage import CONTEXT_LENGTH, collect_shards, plain, write_split


def settings(**changes) -> GenerateTrajectoriesConfig:
    return GenerateTrajectoriesConfig(**{"block_size": 4, "max_new_tokens": 18, "shard_size": 4, "batch_size": 3, "dtype": "float64", **changes})


@pytest.fixture
def train(prompts_folder):
    return artifacts.read_prompts(prompts_folder, "train")


@pytest.fixture
def no_ray(monkeypatch):
    """Importing Ray, and so starting one, is an error."""
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.fixture
def in_process(monkeypatch, no_ray):
    """run() collects its open shards in this process; the list of those it asked for."""
    asked = []

    def run_shards(job, todo, context, **_):
        asked.extend(todo)
        worker = ShardWorker(job)
        for shard in todo:
            worker({"shard": [shard]})

    monkeypatch.setattr(plan, "run_shards", run_shards)
    return asked


def parts(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


# ---- shards


@pytest.mark.parametrize("shard_size", [1, 2, 3, 4, 11, 12, 1000])
def test_shards_hold_every_prompt_once(tmp_path, stage_inputs, train, shard_size):
    job, ids = make_job(settings(shard_size=shard_size), stage_inputs, tmp_path, StageContext())
    shards = [list(job.positions(i)) for i in range(job.shards)]
    assert [i for shard in shards for i in shard] == list(range(len(train)))
    assert all(0 < len(shard) <= shard_size for shard in shards)
    assert ids.tolist() == [p.id for p in train]


def test_the_first_prompts_are_chosen(tmp_path, stage_inputs, train):
    assert make_job(settings(prompts=3), stage_inputs, tmp_path, StageContext())[1].tolist() == [p.id for p in train[:3]]
    with pytest.raises(UserError, match="no training prompt"):
        run(settings(), {**stage_inputs, "prompts": write_split(tmp_path / "none", [])}, tmp_path, StageContext())


@pytest.mark.parametrize("name", ["block_size", "max_new_tokens", "shard_size", "batch_size", "prompts"])
def test_bad_settings_are_named(name):
    with pytest.raises(ValueError, match=rf"^{name} must be at least 1, got 0"):
        settings(**{name: 0})


# ---- files


def test_a_shard_holds_what_collecting_alone_gives(tmp_path, stage_inputs, train):
    config = settings(seed=5)
    collect_shards(config, stage_inputs, tmp_path, range(3))
    model = load_model(stage_inputs["model"], dtype="float64")
    rules = TokenRules.of(model, load_tokenizer(stage_inputs["model"]))
    found = {t.id: t for t in read_trajectories(tmp_path)}
    assert list(found) == [p.id for p in train]
    for prompt in train:
        alone = collect(model, [prompt.input_ids], [prompt.id], block_size=4, max_new_tokens=18, seed=5, rules=rules).trajectories[0]
        assert plain(found[prompt.id]) == plain(alone)
    assert len({len(t.answer_ids) for t in found.values()}) > 2  # the tiny model does end answers


def test_the_order_of_shards_does_not_change_a_byte(tmp_path, stage_inputs):
    collect_shards(settings(), stage_inputs, tmp_path / "a", [0, 1, 2])
    collect_shards(settings(), stage_inputs, tmp_path / "b", [2, 0])
    collect_shards(settings(), stage_inputs, tmp_path / "b", [1])
    assert parts(tmp_path / "a") == parts(tmp_path / "b")
    assert list(parts(tmp_path / "a")) == ["part-000000.parquet", "part-000001.parquet", "part-000002.parquet"]
    collect_shards(settings(seed=1), stage_inputs, tmp_path / "c", [0, 1, 2])
    assert parts(tmp_path / "c") != parts(tmp_path / "a")


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, stage_inputs, in_process):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    metrics = run(settings(), stage_inputs, whole, StageContext())
    assert in_process == [0, 1, 2]
    collect_shards(settings(), stage_inputs, resumed, [1])
    stamp = trajectory_part(resumed, 1).stat().st_mtime_ns
    (resumed / ".part-000002.parquet.99.tmp").write_bytes(b"half a file of a killed worker")
    in_process.clear()
    assert run(settings(), stage_inputs, resumed, StageContext()) == metrics
    assert in_process == [0, 2]
    assert trajectory_part(resumed, 1).stat().st_mtime_ns == stamp
    (resumed / ".part-000002.parquet.99.tmp").unlink()
    assert parts(resumed) == parts(whole)


def test_a_run_with_nothing_left_to_do_starts_no_ray(tmp_path, stage_inputs, no_ray):
    collect_shards(settings(), stage_inputs, tmp_path, range(3))
    before = parts(tmp_path)
    metrics = run(settings(), stage_inputs, tmp_path, StageContext())
    assert parts(tmp_path) == before
    trajectory_part(tmp_path, 1).unlink()
    with pytest.raises(ImportError):  # the guard works: with a shard to do, Ray is asked for
        run(settings(), stage_inputs, tmp_path, StageContext())

    found = list(read_trajectories(collected(tmp_path / "again", stage_inputs)))
    tokens = sum(len(t.answer_ids) for t in found)
    blocks = [len(states) for t in found for states in t.states]
    size = sum(len(raw) for raw in before.values())
    assert metrics == {
        "prompts": 11,
        "trajectories": 11,
        "quarantined": 0,
        **{f"dropped_{reason}": 0 for reason in REASONS},
        "answer_tokens": tokens,
        "disagreements": 0,
        "states_per_block": sum(blocks) / len(blocks),
        "eos_share": sum(t.stop_reason == "eos" for t in found) / 11,
        "bytes_per_answer_token": size / tokens,
    }
    assert 0 < metrics["eos_share"] < 1 and 1 < metrics["states_per_block"] <= 5


def collected(folder, inputs):
    collect_shards(settings(), inputs, folder, range(3))
    return folder


def test_a_missing_row_is_noticed(tmp_path, stage_inputs, no_ray):
    collect_shards(settings(), stage_inputs, tmp_path, range(3))
    path = trajectory_part(tmp_path, 1)
    write_trajectories(path, list(read_trajectories(tmp_path))[4:7])
    with pytest.raises(UserError, match="holds 10 trajectories, 0 quarantined and 0 dropped rows, 1 of 11 prompts are missing"):
        run(settings(), stage_inputs, tmp_path, StageContext())


# ---- bad rows


@pytest.fixture
def poisoned(tmp_path, train, base_folder):
    """Inputs with three prompts that cannot be answered, and their ids by what is wrong with them."""
    good = train[:5]
    bad = {
        "empty": dataclasses.replace(train[5], id=101, input_ids=[]),
        "long": dataclasses.replace(train[5], id=102, input_ids=[300] * (CONTEXT_LENGTH - 5)),
        "unknown": dataclasses.replace(train[5], id=103, input_ids=[5, 10**6, 7]),
    }
    rows = [good[0], bad["long"], good[1], bad["empty"], bad["unknown"], *good[2:]]
    return {"prompts": write_split(tmp_path / "poisoned", rows), "model": base_folder}


@pytest.mark.parametrize("shard_size", [1, 3, 8])
def test_a_bad_row_costs_one_row(tmp_path, stage_inputs, poisoned, train, in_process, shard_size):
    output = tmp_path / "out"
    output.mkdir()
    config = settings(shard_size=shard_size, max_bad_share=0.5)
    metrics = run(config, poisoned, output, StageContext())
    assert (metrics["prompts"], metrics["trajectories"], metrics["quarantined"]) == (8, 5, 3)
    failures = {f["id"]: f["error"] for path in output.glob("quarantine-*.json") for f in artifacts.read_json(path)}
    assert sorted(failures) == [101, 102, 103]
    assert "ValueError" in failures[101] and "at least one token" in failures[101]
    assert "exceed the model's context" in failures[102]
    assert failures[103].startswith("IndexError")
    collect_shards(settings(), stage_inputs, tmp_path / "healthy", range(3))
    healthy = {t.id: plain(t) for t in read_trajectories(tmp_path / "healthy")}
    assert {t.id: plain(t) for t in read_trajectories(output)} == {p.id: healthy[p.id] for p in train[:5]}


def test_workers_say_what_a_shard_gave(tmp_path, poisoned):
    (row,) = collect_shards(settings(shard_size=8), poisoned, tmp_path / "out", [0])
    found = list(read_trajectories(tmp_path / "out"))
    states = [s for t in found for s in t.states]
    assert {name: value for name, (value,) in row.items()} == {
        "shard": 0,
        "trajectories": 5,
        "quarantined": 3,
        **{f"dropped_{reason}": 0 for reason in REASONS},
        "disagreements": 0,
        "answer_tokens": sum(len(t.answer_ids) for t in found),
        "blocks": len(states),
        "forwards": sum(len(s) - 1 for s in states),
        "ended": sum(t.stop_reason == "eos" for t in found),
    }


@pytest.mark.parametrize(("share", "refused"), [(0.0, True), (0.37, True), (0.375, False)])
def test_too_many_bad_rows_are_an_error(tmp_path, poisoned, in_process, share, refused):
    output = tmp_path / "out"
    output.mkdir()
    if not refused:
        assert run(settings(max_bad_share=share), poisoned, output, StageContext())["quarantined"] == 3
        return
    with pytest.raises(UserError, match=rf"^3 of 8 prompts failed, more than trajectories\.max_bad_share={share}; the first: id 102: ValueError"):
        run(settings(max_bad_share=share), poisoned, output, StageContext())


def test_nothing_but_bad_rows_is_an_error(tmp_path, train, base_folder, in_process):
    rows = [dataclasses.replace(train[0], input_ids=[])]
    inputs = {"prompts": write_split(tmp_path / "prompts", rows), "model": base_folder}
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="^1 of 1 prompts failed"):
        run(settings(max_bad_share=1.0), inputs, tmp_path / "out", StageContext())


def test_a_row_that_fails_once_only_is_not_counted_for_ever(tmp_path, stage_inputs, in_process):
    """A worker killed between its two files, then a rerun in which the row works (memory was short, say)."""
    artifacts.write_json(tmp_path / "quarantine-000001.json", [{"id": 1, "error": "OutOfMemoryError: "}])
    metrics = run(settings(), stage_inputs, tmp_path, StageContext())
    assert (metrics["trajectories"], metrics["quarantined"]) == (11, 0)
    assert not list(tmp_path.glob("quarantine-*"))


def test_only_the_bad_rows_are_tried_again(tmp_path, stage_inputs, poisoned, monkeypatch):
    config = settings(shard_size=8)
    collect_shards(config, poisoned, tmp_path, [0])
    before = {t.id: plain(t) for t in read_trajectories(tmp_path)}
    asked = []
    job, _ = make_job(
        config, poisoned, tmp_path, StageContext(), make_collector=lambda: lambda prompts: asked.append([p.id for p in prompts]) or 1 / 0
    )
    ShardWorker(job)({"shard": [0]})
    assert sorted({i for ids in asked for i in ids}) == [101, 102, 103]
    assert {t.id: plain(t) for t in read_trajectories(tmp_path)} == before


# ---- where nothing can be written


def test_an_unwritable_target_is_an_error_before_any_work(tmp_path, stage_inputs, no_ray):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/out: cannot be written \(Not a directory\); make room or choose another paths.store"):
        run(settings(), stage_inputs, tmp_path / "file" / "out", StageContext())


def test_a_full_disk_is_an_error_and_resumable(tmp_path, stage_inputs, in_process, small_disk):
    """On a real file system of 64 KiB."""
    (small_disk / "ballast").write_bytes(b"x" * (50 << 10))
    with pytest.raises(UserError, match=r"cannot be written \(.*No space left on device\).* start again: it resumes"):
        run(settings(shard_size=2), stage_inputs, small_disk, StageContext())
    kept = parts(small_disk)
    assert not [name for name in kept if name.endswith(".tmp") and kept[name]]
    done = [name for name in kept if name.startswith("part-")]
    assert 0 < len(done) < 6
    (small_disk / "ballast").unlink()
    in_process.clear()
    assert run(settings(shard_size=2), stage_inputs, small_disk, StageContext())["trajectories"] == 11
    assert in_process == [i for i in range(6) if f"part-{i:06d}.parquet" not in done]


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


# ---- settings of the method


def test_a_set_for_one_schedule_packs_as_the_whole_set_does(tmp_path, stage_inputs):
    schedule = NoiseSchedule(kind="random", window=2)
    collect_shards(settings(), stage_inputs, tmp_path / "all", range(3))
    collect_shards(settings(collect="schedule", schedule=schedule), stage_inputs, tmp_path / "few", range(3))
    for folder in ("all", "few"):
        (tmp_path / f"{folder}-packed").mkdir()
        pack_sequences.run(PackConfig(schedule=schedule), {"trajectories": tmp_path / folder}, tmp_path / f"{folder}-packed", StageContext())
    assert parts(tmp_path / "all-packed") == parts(tmp_path / "few-packed")
    whole, few = (sum(len(s) for t in read_trajectories(tmp_path / folder) for s in t.states) for folder in ("all", "few"))
    assert few < whole
    with pytest.raises(UserError, match="holds only the states that another noise schedule asks for"):
        pack_sequences.run(PackConfig(schedule=NoiseSchedule(window=2)), {"trajectories": tmp_path / "few"}, tmp_path, StageContext())


@pytest.mark.parametrize(("collect_", "schedule", "says"), [("schedule", None, "needs"), ("all", NoiseSchedule(), "takes no")])
def test_a_schedule_is_for_collecting_by_schedule(collect_, schedule, says):
    with pytest.raises(ValueError, match=f"^collect={collect_} {says} schedule"):
        settings(collect=collect_, schedule=schedule)


def test_workers_and_batches_are_no_part_of_the_fingerprint():
    from pipelines.store import plain as hashed

    assert hashed(settings(batch_size=1)) == hashed(settings(batch_size=7, max_bad_share=0.5, stall_timeout=1.0))
    assert hashed(settings(shard_size=5)) != hashed(settings())
