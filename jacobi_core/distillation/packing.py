"""One training row: [prompt][noisy_0][clean_0][noisy_1][clean_1]..., with everything attention and loss need per token.

Rows on disk, bins and batches are the stages' business (algorithm section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import torch

from jacobi_core.distillation.noise_schedule import NoiseSchedule, nearest_state, target_count, target_ratios
from jacobi_core.trajectories.record import Trajectory, converged_prefix

IGNORE = -100  # a label that carries no loss, as torch's cross-entropy has it
PADDING_SAMPLE = -1


class Kind(IntEnum):
    PROMPT = 0
    NOISY = 1
    CLEAN = 2


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
    """A row of one sample, and the noise ratio each block really got.

    Consistency is counted from the first offset where noisy differs from clean, where the next token exists in the answer;
    the answer ends with its EOS, so nothing past it is ever counted, and EOS is a target but never a counted input.
    """
    n, prompt, answer = trajectory.block_size, trajectory.prompt_ids, trajectory.answer_ids
    targets = target_ratios(schedule, num_blocks=len(trajectory.states), block_size=n, sample_id=trajectory.id)
    next_token = torch.cat([answer[1:], torch.tensor([IGNORE])])
    prompt_labels = torch.full_like(prompt, IGNORE)
    prompt_labels[-1] = answer[0]
    none = torch.full_like(prompt, -1)
    pieces = [PackedRow(prompt, torch.arange(len(prompt)), 0 * prompt, 0 * prompt + Kind.PROMPT, none, none, prompt_labels, none)]
    ratios, at = [], len(prompt)
    for i, states in enumerate(trajectory.states):
        clean = trajectory.fixed_point(i)
        m, start = len(clean), i * n
        unconverged = m - converged_prefix(states, clean)
        noisy = states[nearest_state(unconverged.tolist(), target_count(targets[i], m, schedule.rounding))]
        offset = torch.arange(m)
        differs = (noisy != clean).long().cumsum(0) > 0  # from the first difference on
        counted = differs & (start + offset + 1 < len(answer))
        position, block, window = len(prompt) + start + offset, torch.full((m,), i), torch.full((m,), i // schedule.window)
        teacher = torch.where(counted, at + m + offset, -1)
        ignored = torch.full((m,), IGNORE)
        pieces.append(PackedRow(noisy, position, 0 * noisy, 0 * noisy + Kind.NOISY, block, window, ignored, teacher))
        labels = next_token[start : start + m]
        pieces.append(PackedRow(clean, position, 0 * clean, 0 * clean + Kind.CLEAN, block, window, labels, torch.full((m,), -1)))
        ratios.append(float(differs.sum()) / m)
        at += 2 * m
    return _cat(pieces), ratios


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
