"""The rule of attention.py as something a model's attention can compute: `PackedAttention`, by one of the backends.

Only transformers' public attention interface is used: no model class is touched.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from jacobi_core.decoding.cache import model_mask, refuse_unsuitable
from jacobi_core.distillation.attention import dense_mask
from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from jacobi_core.distillation.flex import FlexPlan, rule_block_mask
from jacobi_core.distillation.model_order import model_order
from jacobi_core.distillation.packed_interface import IMPLEMENTATION, Plan, plan_arguments
from jacobi_core.distillation.packing import PackedRow
from jacobi_core.distillation.segments import SegmentPlan, TooManyCopies, flash_kernel
from jacobi_core.distillation.slices import SlicedPlan

log = logging.getLogger(__name__)


class PackedAttention:
    """How `model` is told who sees whom. Knows nothing of losses.

    The model's attention implementation becomes `jacobi_packed` (dense: sdpa, or eager where it was loaded so). It stays so, because gradient
    checkpointing attends once more in the backward pass; without a plan it is sdpa, so the model decodes as before.
    """

    def __init__(self, model: PreTrainedModel, *, variant: MaskVariant = MaskVariant.nc, backend: Backend = Backend.auto) -> None:
        """model: on the device it will run on. Raises ValueError, saying why and what to choose instead, where the model or the machine does not
        allow the backend."""
        refuse_unsuitable(model, DynamicCache(config=model.config), DynamicLayer)
        self.model, self.variant = model, variant
        self.backend = _automatic(model) if backend is Backend.auto else backend
        if reason := _why_not(self.backend, model):
            raise ValueError(reason)
        if self.backend is not Backend.dense:
            self._implementation = IMPLEMENTATION
        else:
            self._implementation = "eager" if model.config._attn_implementation == "eager" else "sdpa"
        self._kernel = flash_kernel() if self.backend is Backend.flash else None
        self._warned = False
        self._prepare_model()

    def __call__(self, batch: PackedRow) -> tuple[PackedRow, dict[str, Any]]:
        """The batch, fields [B, L], its tokens in the order the backend wants them (teachers renumbered), and what the model's forward
        must be given besides input_ids and position_ids. A batch that flash would copy too many keys for is computed by sliced, with one
        warning: rows differ, and a training run must not end at the first long one."""
        self._prepare_model()
        if self.backend is Backend.dense:
            return batch, {"attention_mask": model_mask(self.model, dense_mask(batch, self.variant))}
        batch = model_order(batch)
        return batch, plan_arguments(self._plan(batch), batch.input_ids.device)

    def _plan(self, batch: PackedRow) -> Plan:
        if self.backend is Backend.flex:
            return FlexPlan(rule_block_mask(batch, self.variant))
        if self.backend is Backend.flash:
            try:
                return SegmentPlan.of(batch, self.variant, kernel=self._kernel)
            except TooManyCopies as error:
                if not self._warned:
                    log.warning("%s. This batch and all others like it are computed by sliced.", error)
                self._warned = True
        return SlicedPlan.of(batch, self.variant)

    def _prepare_model(self) -> None:
        """Again before every batch: another PackedAttention may have had the model since."""
        if self.model.config._attn_implementation != self._implementation:
            self.model.set_attn_implementation(self._implementation)
        if self.model.config._attn_implementation != self._implementation:
            raise ValueError(
                f"{self.model.config.model_type}: its attention cannot be exchanged through transformers' attention interface, "
                "so it cannot be trained on packed rows"
            )


def _automatic(model: PreTrainedModel) -> Backend:
    """flex where it can train; sliced everywhere else. flash only on demand: it copies keys."""
    return Backend.flex if _why_not(Backend.flex, model) is None else Backend.sliced


def _why_not(backend: Backend, model: PreTrainedModel) -> str | None:
    device = model.device.type
    if backend in (Backend.flex, Backend.flash) and device != "cuda":
        why = "FlexAttention has no backward there" if backend is Backend.flex else "its kernels are CUDA's"
        return f"{backend.value} trains on CUDA only, the model is on {device} ({why}): use attention=sliced"
    dropout = getattr(model.config.get_text_config(), "attention_dropout", 0)
    if backend in (Backend.flex, Backend.flash) and dropout:
        return f"{backend.value} has no dropout, the model has attention_dropout={dropout}: use attention=sliced"
    if backend is Backend.flex and importlib.util.find_spec("triton") is None:
        return "flex needs Triton to be compiled, which is not installed: use attention=sliced"
    return None
