"""Random packed rows, and the packed loss written as a loop over tokens: the oracle of the loss tests. torch and transformers only."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import nn
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import model_mask
from jacobi_core.distillation.attention import dense_mask
from jacobi_core.distillation.attention_variant import Backend
from jacobi_core.distillation.losses import LossTerms, PackedLoss
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import IGNORE, PackedRow, pack_trajectory
from jacobi_core.trajectories.record import Trajectory
from tests.core.tiny import VOCABULARY

WINDOW = 2


def random_rows(count: int, *, seed: int, n: int = 4, window: int = WINDOW, kind: str = "random", last: int | None = None) -> list[PackedRow]:
    """Rows of one sample each; the losses do not ask whether a model would have said so."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=g)

    rows = []
    for number in range(count):
        length = int(torch.randint(1, 4 * n, (), generator=g))
        answer = draw(length)
        if last is not None:
            answer[-1] = last
        blocks = answer.split(n)
        states = [torch.cat([torch.where(torch.arange(len(b)) < k, b, draw(len(b))) for k in range(len(b))] + [b]).view(-1, len(b)) for b in blocks]
        trajectory = Trajectory(number, draw(1 + number % 3), answer, "eos", n, states)
        rows.append(pack_trajectory(trajectory, NoiseSchedule(kind=kind, window=window))[0])
    return rows


def packed_loss(model: nn.Module, *, temperature: float = 1.0, window: int = WINDOW) -> PackedLoss:
    return PackedLoss(model, window=window, backend=Backend.dense, temperature=temperature)


def loop(model: PreTrainedModel, batch: PackedRow, *, temperature=1.0, window=WINDOW, consistency_weight=1.0, ar_weight=1.0) -> LossTerms:
    """What PackedLoss must give: all logits from the model itself, one token at a time."""
    mask = model_mask(model, dense_mask(batch))
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask, use_cache=False).logits
    consistency, noisy_tokens, ar, agreement = [0.0 * logits.sum()] * window, [0] * window, 0.0 * logits.sum(), 0
    for row, labels, teachers, blocks in zip(logits, batch.labels.tolist(), batch.teacher.tolist(), batch.block.tolist(), strict=True):
        for i, (label, teacher, block) in enumerate(zip(labels, teachers, blocks, strict=True)):
            if label != IGNORE:
                ar = ar - row[i].log_softmax(-1)[label]
            if teacher >= 0:
                p = (row[teacher].detach() / temperature).softmax(-1)
                kl = temperature**2 * (p * (p.log() - (row[i] / temperature).log_softmax(-1))).sum()
                consistency[block % window] = consistency[block % window] + kl
                noisy_tokens[block % window] += 1
                agreement += int(row[i].argmax() == row[teacher].argmax())
    loss = consistency_weight * sum(consistency) + ar_weight * ar
    return LossTerms(loss, torch.stack(consistency).detach(), torch.tensor(noisy_tokens), ar.detach(), torch.tensor(agreement))


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(model: nn.Module, found: LossTerms, expected: LossTerms) -> None:
    torch.testing.assert_close(found._asdict(), expected._asdict())
    torch.testing.assert_close(gradients(model, found.loss), gradients(model, expected.loss))


def shuffled(batch: PackedRow, seed: int) -> PackedRow:
    """Every row's tokens in another order, as an attention backend may want them."""
    order = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(seed)).argsort(1)
    moved = PackedRow(**{f.name: getattr(batch, f.name).gather(1, order) for f in fields(PackedRow)})
    teacher = order.argsort(1).gather(1, moved.teacher.clamp(min=0))
    return PackedRow(**{**vars(moved), "teacher": torch.where(moved.teacher >= 0, teacher, -1)})
