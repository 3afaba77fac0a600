"""Noise schedules, and samples as rows and pieces of rows, each against something written another way."""

from __future__ import annotations

import math
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.distillation.attention import dense_mask
from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.noise_schedule import KINDS, NoiseSchedule, ScheduleError, nearest_state, target_count, target_ratios
from jacobi_core.distillation.packing import IGNORE, Kind, PackedRow, batch_rows, pack_trajectory, split_sample
from jacobi_core.trajectories.record import Trajectory
from tests.core.tiny import VOCABULARY, tiny_model


def ratios(num_blocks=6, block_size=4, sample_id=1, **schedule):
    return target_ratios(NoiseSchedule(**schedule), num_blocks=num_blocks, block_size=block_size, sample_id=sample_id)


# ---- schedules


def test_schedules_by_hand():
    assert ratios(kind="linear", window=3) == [0, 0.5, 1, 0, 0.5, 1]
    assert ratios(kind="reverse", window=3) == [1, 0.5, 0, 1, 0.5, 0]
    assert ratios(kind="linear", window=4, endpoints="paper") == [0, 0.25, 0.5, 0.75, 0, 0.25]
    assert ratios(kind="reverse", window=4, endpoints="paper") == [0.75, 0.5, 0.25, 0, 0.75, 0.5]
    assert ratios(kind="linear", window=3, t_min=0.2, t_max=0.8) == pytest.approx([0.2, 0.5, 0.8] * 2)
    assert ratios(kind="linear", window=1, t_max=0.9) == [0.9] * 6
    assert ratios(kind="reverse", window=1) == [1.0] * 6
    draws = ratios(kind="random", window=1, num_blocks=4000)
    assert set(draws) == {0.25, 0.5, 0.75, 1.0}
    assert min(draws.count(t) for t in set(draws)) > 800
    assert draws == ratios(kind="random", window=1, num_blocks=4000)
    assert draws != ratios(kind="random", window=1, num_blocks=4000, sample_id=2)
    assert set(ratios(kind="random", window=1, num_blocks=200, t_min=0.5)) == {0.5, 0.75, 1.0}


def test_cllm_is_random_on_clean_text_whatever_else_is_set():
    schedule = NoiseSchedule(kind="cllm", window=7, t_min=0.3, t_max=0.4, seed=5)
    assert (schedule.window, schedule.t_min, schedule.t_max) == (1, 0.0, 1.0)
    assert ratios(kind="cllm", seed=5, num_blocks=50) == ratios(kind="random", window=1, seed=5, num_blocks=50)


def test_state_choice_by_hand():
    assert [target_count(t, 4, NoiseSchedule().rounding) for t in (0, 0.125, 0.3, 0.625, 1)] == [0, 1, 1, 3, 4]
    assert target_count(0.3, 4, NoiseSchedule(rounding="ceil").rounding) == 2
    assert nearest_state([4, 2, 0], 3) == 0  # a tie goes to the earlier, noisier state
    assert nearest_state([4, 3, 1, 0], 2) == 1
    assert nearest_state([4, 3, 1, 0], 0) == 3


def test_bad_schedules_are_refused_by_name():
    for settings_, match in (({"window": 0}, "window"), ({"t_min": 0.8, "t_max": 0.2}, "t_min"), ({"kind": "zigzag"}, "zigzag")):
        with pytest.raises(ValueError, match=match):
            NoiseSchedule(**settings_)
    with pytest.raises(ScheduleError, match=r"^noise_schedule=zigzag: no such schedule; known: linear, random, reverse, cllm, or your own as"):
        NoiseSchedule(kind="zigzag")


OWN = """
NUMBER = 3
seen = []

def ramp(*, num_blocks, block_size, window, t_min, t_max, seed, sample_id):
    seen.append((num_blocks, block_size, window, t_min, t_max, seed, sample_id))
    return [t_min + (t_max - t_min) * i / num_blocks for i in range(num_blocks)]

def short(*, num_blocks, **_):
    return [0.5] * (num_blocks - 1)

def high(*, num_blocks, **_):
    return [0.5] * (num_blocks - 1) + [1.5]

def nan(*, num_blocks, **_):
    return [float("nan")] * num_blocks

def words(*, num_blocks, **_):
    return ["much"] * num_blocks

def fails(**_):
    return 1 / 0

def takes_nothing():
    return []

def gives_none(**_):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Modules of a user's: own_schedules, and own_broken that cannot be imported."""
    (tmp_path / "own_schedules.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("raise RuntimeError('two\\nlines')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_schedules", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("kind", ["own_schedules:ramp", "own_schedules.ramp"])
def test_a_schedule_of_ones_own(own, kind):
    assert "own_schedules" not in sys.modules
    schedule = NoiseSchedule(kind=kind, window=5, t_min=0.2, t_max=0.6, seed=9)
    assert "own_schedules" not in sys.modules  # a config can be made where the module is not
    found = target_ratios(schedule, num_blocks=4, block_size=8, sample_id=11)
    assert found == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert sys.modules["own_schedules"].seen == [(4, 8, 5, 0.2, 0.6, 9, 11)]
    _, noise = pack_trajectory(hand_trajectory(), NoiseSchedule(kind=kind, window=2, t_min=0.9))  # targets 0.9 of 3, 0.95 of 2
    assert noise == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("own_missing:ramp", "cannot be imported (ModuleNotFoundError: No module named 'own_missing')"),
        ("own_schedules:nothing", "cannot be imported (AttributeError: module 'own_schedules' has no attribute 'nothing')"),
        ("own_broken:ramp", "cannot be imported (RuntimeError: two lines)"),
        ("own_schedules.", "cannot be imported (AttributeError: "),
        (":ramp", "cannot be imported (ValueError: "),
        ("own_schedules:NUMBER", "is a int, not a function"),
        ("own_schedules:short", "gave 3 noise ratios for 4 blocks"),
        ("own_schedules:high", "gave a noise ratio of 1.5, which must be from 0 to 1"),
        ("own_schedules:nan", "gave a noise ratio of nan, which must be from 0 to 1"),
        ("own_schedules:words", "failed for {'num_blocks': 4, 'block_size': 8, 'sample_id': 1} (ValueError: "),
        ("own_schedules:fails", "failed for {'num_blocks': 4, 'block_size': 8, 'sample_id': 1} (ZeroDivisionError: "),
        ("own_schedules:takes_nothing", "failed for {'num_blocks': 4, 'block_size': 8, 'sample_id': 1} (TypeError: "),
        ("own_schedules:gives_none", "failed for {'num_blocks': 4, 'block_size': 8, 'sample_id': 1} (TypeError: "),
    ],
)
def test_what_is_wrong_with_ones_own_schedule_is_one_line(own, kind, says):
    with pytest.raises(ScheduleError) as error:
        target_ratios(NoiseSchedule(kind=kind), num_blocks=4, block_size=8, sample_id=1)
    assert str(error.value).startswith(f"noise_schedule={kind}: {says}") and "\n" not in str(error.value)


# ---- one sample


def hand_trajectory():
    """Block size 3, answer 5 6 7 | 8 9(EOS)."""
    states = [torch.tensor([[1, 1, 1], [5, 1, 2], [5, 6, 7]]), torch.tensor([[2, 2], [8, 9]])]
    return Trajectory(3, torch.tensor([30, 31]), torch.tensor([5, 6, 7, 8, 9]), "eos", 3, states)


def test_packed_row_by_hand():
    row, noise = pack_trajectory(hand_trajectory(), NoiseSchedule(kind="linear", window=2, t_min=0.6))  # targets 2 of 3, 2 of 2
    assert noise == [pytest.approx(2 / 3), 1.0]
    assert row.input_ids.tolist() == [30, 31, 5, 1, 2, 5, 6, 7, 2, 2, 8, 9]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 5, 6]
    assert row.kind.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 1, 1, 2, 2]
    assert row.block.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert row.window.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert row.labels.tolist() == [IGNORE, 5, IGNORE, IGNORE, IGNORE, 6, 7, 8, IGNORE, IGNORE, 9, IGNORE]
    # offset 0 of block 0 is converged; the answer's last token (EOS) is a target, never a counted input
    assert row.teacher.tolist() == [-1, -1, -1, 6, 7, -1, -1, -1, 10, -1, -1, -1]


def made_up(seed: int, *, n: int, answer: int, prompt: int) -> Trajectory:
    """Any answer with any states of growing converged prefixes; of few different tokens, so that some are right by chance."""
    draw = random.Random(seed)
    ids = torch.tensor([draw.randrange(5, 9) for _ in range(answer)])
    states = []
    for start in range(0, answer, n):
        fixed = ids[start : start + n]
        block = []
        for prefix in sorted(draw.sample(range(len(fixed)), draw.randint(0, len(fixed)))):
            state = torch.tensor([draw.randrange(5, 9) for _ in fixed])
            state[:prefix], state[prefix] = fixed[:prefix], 4
            block.append(state)
        states.append(torch.stack([*block, fixed]))
    trajectory = Trajectory(seed, torch.tensor([draw.randrange(5, VOCABULARY) for _ in range(prompt)]), ids, "eos", n, states)
    trajectory.validate()
    return trajectory


SHAPES = {
    "seed": st.integers(0, 10_000),
    "n": st.sampled_from([1, 2, 3, 8]),
    "answer": st.integers(1, 25),
    "prompt": st.integers(1, 6),
    "kind": st.sampled_from(KINDS),
    "window": st.integers(1, 4),
}


@settings(max_examples=150, deadline=None)
@given(**SHAPES)
def test_a_row_is_what_a_loop_over_its_blocks_writes(seed, n, answer, prompt, kind, window):
    trajectory, schedule = made_up(seed, n=n, answer=answer, prompt=prompt), NoiseSchedule(kind=kind, window=window)
    row, noise = pack_trajectory(trajectory, schedule)
    clean, targets = trajectory.answer_ids.tolist(), target_ratios(schedule, num_blocks=len(noise), block_size=n, sample_id=seed)
    expected = [(int(t), i, 0, -1, -1, IGNORE, -1) for i, t in enumerate(trajectory.prompt_ids)]
    expected[-1] = (*expected[-1][:5], clean[0], -1)
    for i, states in enumerate(trajectory.states):
        fixed = clean[i * n : (i + 1) * n]
        m = len(fixed)
        prefixes = [next((k for k in range(m) if state[k] != fixed[k]), m) for state in states.tolist()]
        best = min(range(len(states)), key=lambda j: (abs(m - prefixes[j] - math.floor(targets[i] * m + 0.5)), j))
        assert noise[i] == (m - prefixes[best]) / m
        at, where = len(expected), (i, i // schedule.window)
        for k in range(m):
            taught = k >= prefixes[best] and i * n + k + 1 < answer
            expected.append((int(states[best][k]), prompt + i * n + k, 1, *where, IGNORE, at + m + k if taught else -1))
        for k in range(m):
            following = clean[i * n + k + 1] if i * n + k + 1 < answer else IGNORE
            expected.append((fixed[k], prompt + i * n + k, 2, *where, following, -1))
    names = ("input_ids", "position_ids", "kind", "block", "window", "labels", "teacher")
    assert list(zip(*(getattr(row, name).tolist() for name in names), strict=True)) == expected
    assert row.sample.tolist() == [0] * len(expected)


# ---- a sample that is longer than a row


def losses(model, row: PackedRow, variant: MaskVariant) -> dict[tuple[str, int], float]:
    """(which loss, position of its input token) -> its value, from dense logits."""
    batch = batch_rows([row])
    with torch.inference_mode():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=dense_mask(batch, variant), use_cache=False).logits[
            0
        ]
    found = {}
    for i in range(len(row)):
        if row.labels[i] != IGNORE:
            found["ar", int(row.position_ids[i])] = float(F.cross_entropy(logits[i], row.labels[i]))
        if row.teacher[i] >= 0:
            teacher = logits[row.teacher[i]].softmax(-1)
            found["consistency", int(row.position_ids[i])] = float((teacher * (teacher.log() - logits[i].log_softmax(-1))).sum())
    return found


@settings(max_examples=40, deadline=None)
@given(**SHAPES, variant=st.sampled_from(MaskVariant), slack=st.integers(0, 3))
def test_pieces_carry_every_loss_of_the_whole_once(seed, n, answer, prompt, kind, window, variant, slack):
    """In fp64, token by token; so both sums are the whole row's too. With room for the last window's context, nothing is left out."""
    model = tiny_model(seed=6)
    row, _ = pack_trajectory(made_up(seed, n=n, answer=answer, prompt=prompt), NoiseSchedule(kind=kind, window=window))
    max_length = min(len(row), prompt + answer + NoiseSchedule(kind=kind, window=window).window * n + slack)
    pieces = split_sample(row, max_length=max_length)
    assert max(map(len, pieces)) <= max_length
    found: dict[tuple[str, int], float] = {}
    for piece in pieces:
        own = losses(model, piece, variant)
        assert not found.keys() & own.keys()
        found |= own
        for name in ("block", "window", "teacher"):
            assert (getattr(piece, name)[piece.kind == Kind.PROMPT] == -1).all(), name
    assert found == pytest.approx(losses(model, row, variant))
    # every block is trained on once, but a last one that is one token and a window alone; what a piece has before its first block is the text
    # from its start
    blocks = [b for piece in pieces for b in piece.block[piece.kind == Kind.NOISY].unique().tolist()]
    last, alone = int(row.block.max()), int((row.window == row.window.max()).sum()) == 2
    assert blocks in [list(range(last + 1)), *([list(range(last))] if alone else [])]
    assert all((piece.labels != IGNORE).any() or (piece.teacher >= 0).any() for piece in pieces)
    text = row.input_ids[row.kind != Kind.NOISY]
    for piece in pieces:
        unnoisy = piece.input_ids[piece.kind != Kind.NOISY]
        assert unnoisy.tolist() == text[: len(unnoisy)].tolist()
        assert piece.position_ids[piece.kind != Kind.NOISY].tolist() == list(range(len(unnoisy)))


def test_pieces_by_hand():
    """Two windows of one block: prompt 30 31, then 5 6 7 | 8 9."""
    row, _ = pack_trajectory(hand_trajectory(), NoiseSchedule(kind="reverse", window=1))  # all noise
    first, second = split_sample(row, max_length=9)
    assert first.input_ids.tolist() == [30, 31, 1, 1, 1, 5, 6, 7]
    assert first.labels.tolist() == [IGNORE, 5, IGNORE, IGNORE, IGNORE, 6, 7, 8]  # the next piece's first token is predicted here
    assert first.teacher.tolist() == [-1, -1, 5, 6, 7, -1, -1, -1]
    assert second.input_ids.tolist() == [30, 31, 5, 6, 7, 2, 2, 8, 9]
    assert second.kind.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2]
    assert second.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6]
    assert second.block.tolist() == second.window.tolist() == [-1] * 5 + [1] * 4
    assert second.labels.tolist() == [IGNORE] * 7 + [9, IGNORE]
    assert second.teacher.tolist() == [-1] * 5 + [7, -1, -1, -1]


@pytest.mark.parametrize(("max_length", "blocks"), [(12, [[0, 1]]), (11, [[0], [1]]), (9, [[0], [1]]), (8, [[0]]), (7, [])])
def test_a_window_that_does_not_fit_its_context_is_left_out(max_length, blocks):
    row, _ = pack_trajectory(hand_trajectory(), NoiseSchedule(kind="reverse", window=1))
    pieces = split_sample(row, max_length=max_length)
    assert [piece.block[piece.block >= 0].unique().tolist() for piece in pieces] == blocks


def test_a_short_last_window_may_fit_where_the_first_does_not():
    trajectory = made_up(1, n=8, answer=18, prompt=2)  # windows of 8, 8 and 2 tokens: 18, 26 and 22 with their context
    row, _ = pack_trajectory(trajectory, NoiseSchedule(kind="reverse", window=1))
    for max_length, blocks in ((17, []), (18, [[0]]), (22, [[0], [2]]), (26, [[0], [1], [2]]), (30, [[0], [1, 2]])):
        assert [p.block[p.block >= 0].unique().tolist() for p in split_sample(row, max_length=max_length)] == blocks, max_length


def test_a_last_window_of_one_token_is_no_piece_alone():
    """It has no loss of its own: the piece before it predicts it."""
    trajectory = made_up(1, n=8, answer=17, prompt=2)  # windows of 8, 8 and 1 tokens: 18, 26 and 20 with their context
    row, _ = pack_trajectory(trajectory, NoiseSchedule(kind="reverse", window=1))
    for max_length, blocks in ((20, [[0]]), (28, [[0], [1, 2]]), (26, [[0], [1]])):
        pieces = split_sample(row, max_length=max_length)
        assert [p.block[p.block >= 0].unique().tolist() for p in pieces] == blocks, max_length
    assert pieces[-1].labels[-1] == trajectory.answer_ids[-1]
