"""What the app reads is what the stages wrote, and every kind of damage is one sentence."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from dashboards import stored
from dashboards.stored import Packed, Stages, TrajectoryPart, Unreadable
from tasks import artifacts, trajectory_files
from tasks.packed_files import PackedRows
from tests.dashboards.made_store import ACCEPTED, Made, fingerprint_of, part_of


def stages(made: Made) -> Stages:
    return Stages(made.outputs / "store")


def test_every_block_of_every_trajectory_is_read_as_it_was_written(made: Made):
    part = TrajectoryPart.read(part_of(made))
    written = list(trajectory_files.read_rows(part_of(made)))
    assert part.rows["id"].tolist() == [row.id for row in written] and part.collect == "all"
    assert part.rows["answer_tokens"].tolist() == [len(row.answer_ids) for row in written]
    blocks = 0
    for number, row in enumerate(written):
        assert part.rows.iloc[number]["most_iterations"] == max(len(states) - 1 for states in row.states)
        for block, states in enumerate(row.states):
            read = part.block(number, block, None).pivot(index="iteration", columns="position", values="id")
            np.testing.assert_array_equal(read.to_numpy(), states)
            blocks += 1
    assert blocks > len(written)  # some answer has several blocks


def test_texts_are_those_of_the_prompts_tokenizer(made: Made):
    text = stages(made).token_text(made.stage("round1/pack"))  # which knows only its trajectories
    part = TrajectoryPart.read(part_of(made))
    prompt, _ = part.texts(0, text)
    assert "Write add_" in prompt
    assert part.texts(0, None)[0].split() == [str(i) for i in next(trajectory_files.read_rows(part_of(made))).prompt_ids]
    cells = part.block(0, 0, text)
    assert cells["text"].tolist() == [text(i) for i in cells["id"]]


def test_without_its_tokenizer_there_are_no_texts(copied: Made):
    (copied.stage("prompts") / "tokenizer" / "tokenizer.json").unlink()
    assert stages(copied).token_text(copied.stage("round1/trajectories")) is None


def test_every_packed_row_is_read_as_it_was_written(made: Made):
    packed, written = Packed.read(made.stage("round1/pack")), PackedRows(made.stage("round1/pack") / "packed.parquet")
    assert packed.rows == len(written) > 1
    for number, row in enumerate(written.read(range(len(written)))):
        tokens = packed.tokens(number, None)
        for ours, theirs in {"id": "input_ids", "position": "position_ids", "label": "labels"}.items():
            np.testing.assert_array_equal(tokens[ours], getattr(row, theirs))
        for name in ("sample", "kind", "block", "window", "teacher"):
            np.testing.assert_array_equal(tokens[name], getattr(row, name))


def test_prompts_training_and_evaluations(made: Made):
    asked = stored.prompts(made.stage("prompts"), "test", 3)
    assert asked == [prompt.messages[0]["content"] for prompt in artifacts.read_prompts(made.stage("prompts"), "test")[:3]]
    curves, probes = stored.training(made.stage("round1/distill"), "round1")
    assert curves["tokens"].tolist() == [1000, 2000, 3000] and probes["step"].tolist() == [0, 2] and set(probes["model"]) == {"round1"}
    lengths = stored.accepted_lengths(stored.evaluation(made.stage("base/evaluate")))
    assert lengths == {"jacobi@16": {int(k): n for k, n in ACCEPTED["base"].items()}}  # neither AR nor batches


def test_folders_are_found_by_kind_and_fingerprint(copied: Made):
    found = stages(copied)
    assert found.folder(fingerprint_of("round1/pack")) == copied.stage("round1/pack")
    assert found.named("trajectories") == [copied.stage("round1/trajectories")] and stored.models(found) == [copied.stage("base")]
    (copied.outputs / "store" / f".wiped-pack-{fingerprint_of('round1/pack')}").mkdir()
    assert found.folder(fingerprint_of("round1/pack")) == copied.stage("round1/pack")  # not what waits for its deletion
    assert found.title(copied.stage("base")) == "base (base-00000000000000bb)"


@pytest.mark.parametrize(
    ("spoil", "read", "said"),
    [
        (lambda m: part_of(m).write_bytes(b"x"), lambda m: TrajectoryPart.read(part_of(m)), "part-000000.parquet cannot be read"),
        (
            lambda m: pq.write_table(
                pq.read_table(m.stage("round1/pack") / "packed.parquet").replace_schema_metadata({"artifact": "packed"}), part_of(m)
            ),
            lambda m: TrajectoryPart.read(part_of(m)),
            "holds packed version",
        ),
        (
            lambda m: (m.stage("round1/pack") / "packed.parquet").unlink(),
            lambda m: Packed.read(m.stage("round1/pack")),
            "packed.parquet is not there: the stage is unfinished, or its files were deleted",
        ),
        (
            lambda m: (m.stage("round1/distill") / "training.json").write_text("{"),
            lambda m: stored.training(m.stage("round1/distill"), "round1"),
            "training.json cannot be read",
        ),
        (lambda m: m.stage("base").rename(m.outputs / "away"), lambda m: stages(m).folder(fingerprint_of("base")), "holds no stage 00000000000000bb"),
    ],
)
def test_damage_is_a_sentence(copied: Made, spoil, read, said: str):
    spoil(copied)
    with pytest.raises(Unreadable, match=said) as caught:
        read(copied)
    assert str(caught.value).endswith((".", ")")) and "\n" not in str(caught.value)
