"""Progressive consistency + AR loss of a packed batch, from one forward (paper eq. 8-10, algorithm section 5).

Sums and counts, not means: the caller divides by counts over the whole global batch. Logits exist for one chunk at a time.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from jacobi_core.distillation.backends import PackedAttention
from jacobi_core.distillation.chunked_head import at_least_float32, chunked_loss
from jacobi_core.distillation.loss_plan import LossPlan, plan_loss
from jacobi_core.distillation.packing import IGNORE, PackedRow

log = logging.getLogger(__name__)

CHUNK_LOGITS = 2**26  # most logits (tokens x vocabulary) at a time; a handful of tensors of this size is the loss's working memory


class LossTerms(NamedTuple):
    """loss: scalar with a gradient, consistency_weight * sum of KL + ar_weight * sum of cross-entropy. The rest has none.

    consistency: [w], sum of KL(teacher || student) * T^2 over the counted noisy tokens at each position of a block in its window;
    noisy_tokens: [w], how many those are; ar: scalar, sum of next-token cross-entropy; agreement: scalar, counted noisy tokens whose
    argmax is the teacher's. (A tuple, because FSDP2 looks for its root's outputs in tuples.)
    """

    loss: torch.Tensor
    consistency: torch.Tensor
    noisy_tokens: torch.Tensor
    ar: torch.Tensor
    agreement: torch.Tensor


def loss_counts(batch: PackedRow) -> torch.Tensor:
    """long [2]: consistency tokens and AR tokens of a batch. For whoever has no packed file, which holds them per row (benchmarks, tests)."""
    return torch.stack([(batch.teacher >= 0).sum(), (batch.labels != IGNORE).sum()])


class PackedLoss(nn.Module):
    """A causal language model together with its packed loss: body, head and loss inside one forward, the unit that FSDP2 wraps.

    Arithmetic of the loss is float32 at least. A batch's tokens may stand in any order, its rows may hold no noisy or no labelled token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        window: int,
        variant: MaskVariant = MaskVariant.nc,
        backend: Backend = Backend.auto,
        temperature: float = 1.0,
    ) -> None:
        """model: with its weights, not sharded yet (a few tokens are fed to see whether its logits are just its head's); adapters are inside it.
        window: w of the schedule the rows were packed with. Raises ValueError as PackedAttention does."""
        super().__init__()
        self.model, self.window, self.temperature = model, window, temperature
        self.head_is_plain = _head_is_plain(model)
        if not self.head_is_plain:
            kind = model.config.model_type
            if "logits_to_keep" not in inspect.signature(model.forward).parameters:
                raise ValueError(f"{kind}: its logits are not its head's alone, and its forward takes no logits_to_keep; it cannot be distilled")
            log.info("%s changes logits behind its head: they are kept for all tokens with a loss, in memory that grows with them", kind)
        self._attention = PackedAttention(model, variant=variant, backend=backend)

    def forward(self, batch: PackedRow, *, consistency_weight: float = 1.0, ar_weight: float = 1.0) -> LossTerms:
        """batch: fields [B, L]. The weights hold 1 / the number of tokens of each term in the whole global batch; they are needed here
        because gradients are taken chunk by chunk, see chunked_head.py. One backward only."""
        # 1. attention first: it may re-order the batch. Where it reads tokens from the device (sliced, flash), it waits for it, and the plan, which
        # always does, then finds nothing left to wait for
        batch, inputs = self._attention(batch)
        plan = plan_loss(batch, window=self.window, limit=CHUNK_LOGITS // self.model.config.get_text_config().vocab_size)
        hidden, head = self._hidden(batch, plan, inputs)
        # 2. head and loss, chunk by chunk
        terms = _ChunkTerms(plan, hidden, temperature=self.temperature, consistency_weight=consistency_weight, ar_weight=ar_weight)
        loss = chunked_loss(hidden, plan.sizes, head=head, chunk_loss=terms)
        # 3. the curves
        by_position = torch.zeros(self.window, dtype=loss.dtype, device=loss.device)
        return LossTerms(
            loss=loss,
            consistency=by_position.index_add_(0, _to(plan.position, loss), torch.cat([by_position[:0], *terms.divergence])),
            noisy_tokens=_to(torch.bincount(plan.position, minlength=self.window), loss),
            ar=terms.ar,
            agreement=terms.agreement,
        )

    def _hidden(self, batch: PackedRow, plan: LossPlan, inputs: dict[str, Any]) -> tuple[torch.Tensor, nn.Module]:
        """[T, D] for the plan's tokens, and what makes logits of them."""
        given = dict(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **inputs)
        if self.head_is_plain:
            hidden = self.model.base_model(**given).last_hidden_state.flatten(0, 1)
            return hidden.index_select(0, _to(plan.tokens, hidden)), self.model.get_output_embeddings()
        columns, at = (plan.tokens % len(batch)).unique(return_inverse=True)
        logits = self.model(**given, logits_to_keep=_to(columns, batch.input_ids)).logits.flatten(0, 1)
        return logits.index_select(0, _to(plan.tokens // len(batch) * len(columns) + at, logits)), nn.Identity()


class _ChunkTerms:
    """The loss of one chunk's logits; the terms without their weights add up on the side."""

    def __init__(self, plan: LossPlan, like: torch.Tensor, *, temperature: float, consistency_weight: float, ar_weight: float) -> None:
        self.temperature, self.weights, self.clean_sizes = temperature, (consistency_weight, ar_weight), plan.clean_sizes
        self.labels = _to(plan.labels, like).split(plan.clean_sizes) if plan.sizes else ()
        self.teacher = _to(plan.teacher, like).split(plan.noisy_sizes) if plan.sizes else ()
        self.ar = torch.zeros((), dtype=at_least_float32(like.dtype), device=like.device)
        self.agreement = torch.zeros((), dtype=torch.long, device=like.device)
        self.divergence: list[torch.Tensor] = []  # [noisy tokens] of each chunk

    def __call__(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """logits [clean + noisy, V] of a chunk, as the plan has them."""
        labels, teacher_of, t = self.labels[number], self.teacher[number], self.temperature
        clean, noisy = logits.to(at_least_float32(logits.dtype)).split([len(labels), len(teacher_of)])
        ar = F.cross_entropy(clean, labels, ignore_index=IGNORE, reduction="sum")
        teacher = clean.detach()[teacher_of]
        divergence = F.kl_div(F.log_softmax(noisy / t, -1), F.log_softmax(teacher / t, -1), reduction="none", log_target=True).sum(-1) * t**2
        self.ar += ar.detach()
        self.agreement += (noisy.argmax(-1) == teacher.argmax(-1)).sum()
        self.divergence.append(divergence.detach())
        return self.weights[0] * divergence.sum() + self.weights[1] * ar


def _to(cpu: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return cpu.to(like.device, non_blocking=True)  # without waiting: CUDA takes its own copy of pageable memory first


def _head_is_plain(model: PreTrainedModel) -> bool:
    """Are its logits its output embeddings applied to its body's last hidden state? Some models scale or cap them afterwards."""
    body, head = model.base_model, model.get_output_embeddings()
    if head is None or body is model:
        return False
    given = dict(input_ids=torch.arange(min(8, model.config.get_text_config().vocab_size), device=model.device).unsqueeze(0), use_cache=False)
    training = model.training
    model.eval()
    with torch.no_grad():
        expected, found = model(**given).logits, head(body(**given).last_hidden_state)
    model.train(training)
    return torch.equal(found.double(), expected.double())  # the same operations, so to the last bit
