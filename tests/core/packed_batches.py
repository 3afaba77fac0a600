"""Batches of packed rows of random prompts, answers and states, and what a model makes of them by each plan. torch and transformers only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from jacobi_core.distillation.backends import PackedAttention
from jacobi_core.distillation.model_order import model_order
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packed_interface import IMPLEMENTATION, plan_arguments
from jacobi_core.distillation.packing import IGNORE, PackedRow, batch_rows, join_samples, pack_trajectory
from jacobi_core.distillation.segments import SegmentPlan
from jacobi_core.distillation.slices import SlicedPlan
from jacobi_core.trajectories.record import Trajectory
from tests.core.tiny import VOCABULARY

SHAPES = st.lists(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 24)), min_size=1, max_size=3), min_size=1, max_size=3)
ROWS = [[(3, 17)], [(1, 4), (5, 9), (2, 1)]]


def random_trajectory(prompt: int, answer: int, *, n: int, generator: torch.Generator) -> Trajectory:
    """Blocks of three states: two random ones and the fixed point."""
    ids = torch.randint(5, VOCABULARY, (prompt + answer,), generator=generator)
    states = []
    for start in range(0, answer, n):
        fixed = ids[prompt + start : prompt + min(start + n, answer)]
        states.append(torch.cat([torch.randint(5, VOCABULARY, (2, len(fixed)), generator=generator), fixed[None]]))
    return Trajectory(0, ids[:prompt], ids[prompt:], "eos", n, states)


def random_batch(rows: Sequence[Sequence[tuple[int, int]]], *, n: int, window: int, seed: int = 0, multiple_of: int = 8) -> PackedRow:
    """rows: per row, per sample, (prompt length, answer length)."""
    generator = torch.Generator().manual_seed(seed)
    schedule = NoiseSchedule(kind="reverse", window=window)
    made = [join_samples([pack_trajectory(random_trajectory(p, a, n=n, generator=generator), schedule)[0] for p, a in row]) for row in rows]
    return batch_rows(made, multiple_of=multiple_of)


def loop_kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, scaling):
    """What a variable-length kernel computes, segment by segment: bottom-right causal."""
    out = []
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        assert b - a <= longest_q and d - c <= longest_k
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(int((d - c) - (b - a)))
        heads = [t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d])]
        out.append(F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scaling, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(out)


def sliced(batch, variant, **sizes):
    return SlicedPlan.of(batch, variant, **sizes)


def cut(batch, variant):
    return SlicedPlan.of(batch, variant, chunk=5, short=0)


def flash(batch, variant):
    return SegmentPlan.of(batch, variant, kernel=loop_kernel, copies=100)


PLANS = {"sliced": sliced, "sliced, cut": cut, "flash": flash}


def logits_of(model, batch, *, variant=MaskVariant.nc, plan=None) -> tuple[PackedRow, torch.Tensor]:
    """By a plan, or by the oracle."""
    if plan is None:
        batch, inputs = PackedAttention(model, variant=variant, backend=Backend.dense)(batch)
    else:
        batch = model_order(batch)
        model.set_attn_implementation(IMPLEMENTATION)
        inputs = plan_arguments(plan(batch, variant), torch.device("cpu"))
    return batch, model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **inputs).logits


def loss_and_gradient(model, batch, **how):
    """A loss that all labelled, noisy and teaching logits enter, and its gradient by all weights."""
    model.zero_grad()
    batch, logits = logits_of(model, batch, **how)
    logits = logits.log_softmax(-1)
    labelled = batch.labels != IGNORE
    rows, index = (batch.teacher >= 0).nonzero(as_tuple=True)
    loss = F.nll_loss(logits[labelled], batch.labels[labelled]) + (logits[rows, batch.teacher[rows, index]] - logits[rows, index]).square().sum()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])
