"""One training row: [prompt][noisy_0][clean_0][noisy_1][clean_1]..., with everything attention and loss need per token.

Rows on disk, bins and batches are the stages' business (algorithm section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from jacobi_core.distillation.noise_schedule import NoiseSchedule, nearest_state, target_count, target_ratios
from jacobi_core.distillation.visibility import Kind
from jacobi_core.trajectories.record import Trajectory, converged_prefix

IGNORE = -100  # a label that carries no loss, as torch's cross-entropy has it
PADDING_SAMPLE = -1


@dataclass
class PackedRow:
    """Per token, long [L] (or [B, L] in a batch).

    sample: which sample of the row, -1 for padding; block and window: 0-based, -1 in a prompt; labels: next token of the
    clean answer where the AR loss is taken, else IGNORE; teacher: where the consistency loss is taken, the row index of the
    clean token whose logits teach this noisy one, else -1.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sample: torch.Tensor
    kind: torch.Tensor
    block: torch.Tensor
    window: torch.Tensor
    labels: torch.Tensor
    teacher: torch.Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[-1]

    def to(self, device: torch.device) -> PackedRow:
        return PackedRow(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


_PADDING = {"sample": PADDING_SAMPLE, "block": -1, "window": -1, "labels": IGNORE, "teacher": -1}  # all other fields: 0


def pack_trajectory(trajectory: Trajectory, schedule: NoiseSchedule) -> tuple[PackedRow, list[float]]:
    """A row of one sample, and the noise ratio each block really got. Raises ScheduleError.

    Consistency is counted from the first offset where noisy differs from clean, where the next token exists in the answer;
    the answer ends with its EOS, so nothing past it is ever counted, and EOS is a target but never a counted input.
    """
    n, answer, context = trajectory.block_size, trajectory.answer_ids, len(trajectory.prompt_ids)
    # 1. of every block, the state that the schedule asks for
    unconverged = _unconverged(trajectory)
    targets = target_ratios(schedule, num_blocks=len(unconverged), block_size=n, sample_id=trajectory.id)
    noisy, noise, ratios = [], [], []
    for states, counts, target in zip(trajectory.states, unconverged, targets, strict=True):
        m = states.shape[1]
        chosen = nearest_state(counts, target_count(target, m, schedule.rounding))
        noisy.append(states[chosen])
        noise.append(counts[chosen])
        ratios.append(counts[chosen] / m)
    # 2. what is known of every answer token: its block, and where in the row its noisy and its clean copy stand
    token = torch.arange(len(answer))
    block = token // n
    size = torch.full_like(token, n)  # of its block
    size[block[-1] * n :] = len(answer) - block[-1] * n
    noisy_at = context + block * n + token
    clean_at = noisy_at + size
    counted = (token - block * n >= size - torch.tensor(noise)[block]) & (token + 1 < len(answer))
    # 3. the row: the prompt and padding values, then both copies
    length = context + 2 * len(answer)
    row = PackedRow(**{f.name: torch.full((length,), _PADDING.get(f.name, 0)) for f in fields(PackedRow)})
    row.sample.zero_()
    row.input_ids[:context], row.input_ids[noisy_at], row.input_ids[clean_at] = trajectory.prompt_ids, torch.cat(noisy), answer
    row.position_ids[:context] = torch.arange(context)
    row.kind[noisy_at], row.kind[clean_at] = int(Kind.NOISY), int(Kind.CLEAN)
    for copy in (noisy_at, clean_at):
        row.position_ids[copy], row.block[copy], row.window[copy] = context + token, block, block // schedule.window
    row.labels[context - 1], row.labels[clean_at[:-1]] = answer[0], answer[1:]
    row.teacher[noisy_at] = torch.where(counted, clean_at, -1)
    return row, ratios


def _unconverged(trajectory: Trajectory) -> list[list[int]]:
    """Per block, of every state, how many tokens follow its converged prefix."""
    n, states = trajectory.block_size, trajectory.states
    last = states[-1].shape[1]
    padded = torch.cat([*states[:-1], F.pad(states[-1], (0, n - last))])  # padding equals itself, and converges last
    fixed = F.pad(trajectory.answer_ids, (0, n - last)).view(-1, n)
    counts = torch.tensor([len(s) for s in states])
    sizes = torch.tensor([n] * (len(states) - 1) + [last])
    prefix = converged_prefix(padded, fixed.repeat_interleave(counts, 0))
    found = (sizes.repeat_interleave(counts) - prefix).clamp(min=0)
    return [block.tolist() for block in found.split(counts.tolist())]


def split_sample(row: PackedRow, *, max_length: int) -> list[PackedRow]:
    """A sample that is too long for a row as pieces that are not, cut between windows; a window that fits none is left out.

    A piece sees all clean text before it as its prompt. Positions, blocks and windows keep their numbers, and every loss token is in
    exactly one piece: that of its own window. A piece's last clean token has a label that is the first token of the next piece. So a last
    window of one token has no loss of its own: alone it is no piece, and nothing is lost by that.
    """
    pieces, first, windows = [], 0, int(row.window.max()) + 1
    noisy = row.kind == Kind.NOISY
    while first < windows:
        earlier = (row.window < first) & ~noisy
        # tokens of the piece, if it ended after each window from `first` on
        own = torch.bincount(row.window[row.window >= first] - first)
        fitting = int((earlier.sum() + own.cumsum(0) <= max_length).sum())
        if fitting:
            keep = earlier | ((row.window >= first) & (row.window < first + fitting))
            pieces.append(_piece(row, keep, prompt=earlier & (first > 0)))
        first += max(1, fitting)
    return [piece for piece in pieces if (piece.labels != IGNORE).any() or (piece.teacher >= 0).any()]


def _piece(row: PackedRow, keep: torch.Tensor, *, prompt: torch.Tensor) -> PackedRow:
    """The kept tokens; those of `prompt` without block, window and loss."""
    moved = keep.cumsum(0) - 1
    changed = {"kind": int(Kind.PROMPT), "block": -1, "window": -1, "labels": IGNORE, "teacher": -1}
    teacher = torch.where(row.teacher >= 0, moved[row.teacher], -1)
    values = {**vars(row), "teacher": teacher}
    return PackedRow(**{name: (value.masked_fill(prompt, changed[name]) if name in changed else value)[keep] for name, value in values.items()})


def join_samples(samples: Sequence[PackedRow]) -> PackedRow:
    """Several samples in one row: sample ids renumbered, teachers shifted."""
    shifted, at = [], 0
    for number, sample in enumerate(samples):
        teacher = torch.where(sample.teacher >= 0, sample.teacher + at, -1)
        shifted.append(PackedRow(**{**vars(sample), "sample": torch.full_like(sample.sample, number), "teacher": teacher}))
        at += len(sample)
    return _cat(shifted)


def batch_rows(rows: Sequence[PackedRow], *, multiple_of: int = 1) -> PackedRow:
    """Rows right-padded to one length, a multiple of `multiple_of`; fields are [B, L]. Padding has no effect on any loss."""
    length = -(-max(len(r) for r in rows) // multiple_of) * multiple_of
    out = {}
    for f in fields(PackedRow):
        batch = torch.full((len(rows), length), _PADDING.get(f.name, 0), dtype=torch.long)
        for i, row in enumerate(rows):
            batch[i, : len(row)] = getattr(row, f.name)
        out[f.name] = batch
    return PackedRow(**out)


def _cat(pieces: Sequence[PackedRow]) -> PackedRow:
    return PackedRow(**{f.name: torch.cat([getattr(p, f.name) for p in pieces]) for f in fields(PackedRow)})
