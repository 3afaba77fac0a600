"""Progressive consistency + AR loss of a packed batch, from one forward (paper eq. 8-10, algorithm section 5).

Sums and counts, not means: the caller divides by counts over the whole global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import model_mask
from jacobi_core.distillation.attention import dense_mask
from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.packing import IGNORE, PackedRow


@dataclass
class LossTerms:
    """Scalars. consistency: sum of KL(teacher || student) * T^2 over counted noisy tokens; ar: sum of next-token cross-entropy.

    agreement: counted noisy tokens whose argmax is the teacher's.
    """

    consistency: torch.Tensor
    ar: torch.Tensor
    agreement: torch.Tensor


def loss_counts(batch: PackedRow) -> torch.Tensor:
    """long [2]: consistency tokens and AR tokens of a batch; knows nothing of logits, so it can be summed over ranks first."""
    return torch.stack([(batch.teacher >= 0).sum(), (batch.labels != IGNORE).sum()])


def loss_terms(model: PreTrainedModel, batch: PackedRow, *, variant: MaskVariant = MaskVariant.nc, temperature: float = 1.0) -> LossTerms:
    """One forward of `model` (or its FSDP2-wrapped self) over batch fields [B, L]; logits only where a loss needs them."""
    student, labelled = batch.teacher >= 0, batch.labels != IGNORE
    needed = student | labelled
    needed = needed.scatter(1, batch.teacher.clamp(min=0), True) if bool(student.any()) else needed  # teachers too; index 0 is harmless
    columns = needed.any(0).nonzero().flatten()  # logits_to_keep is one index for all rows of a batch
    column_of = torch.full((len(batch),), -1, device=columns.device).scatter(0, columns, torch.arange(len(columns), device=columns.device))
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=model_mask(model, dense_mask(batch, variant)),
        use_cache=False,
        logits_to_keep=columns,
    ).logits

    def at(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return logits[rows, column_of[index]].float() if logits.dtype != torch.float64 else logits[rows, column_of[index]]

    rows, index = labelled.nonzero(as_tuple=True)
    ar = F.cross_entropy(at(rows, index), batch.labels[rows, index], reduction="sum")
    rows, index = student.nonzero(as_tuple=True)
    teacher, noisy = at(rows, batch.teacher[rows, index]).detach(), at(rows, index)
    divergence = F.kl_div(F.log_softmax(noisy / temperature, -1), F.log_softmax(teacher / temperature, -1), reduction="sum", log_target=True)
    agreement = (noisy.argmax(-1) == teacher.argmax(-1)).sum()
    return LossTerms(consistency=divergence * temperature**2, ar=ar, agreement=agreement)
