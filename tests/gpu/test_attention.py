"""flex and flash on a CUDA device, forward and backward, against the dense oracle. What the CPU can show: tests/core/test_attention_backends.py.

Needs no Ray. Never run so far.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from jacobi_core.distillation.backends import PackedAttention
from jacobi_core.distillation.losses import PackedLoss, loss_counts
from jacobi_core.distillation.packing import IGNORE
from jacobi_core.distillation.segments import SegmentPlan
from tests.core.packed_batches import random_batch
from tests.core.tiny import FAMILIES, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
# head_dim 16 is the smallest that flex takes
WIDE = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)


def loss_and_gradient(family, backend, *, batch, variant, dtype, checkpointing=False):
    sizes = WIDE if family == "qwen2" else WIDE | {"head_dim": 16}
    model = tiny_model(family, seed=1, dtype=dtype, **sizes).train().to(DEVICE)
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    batch, inputs = PackedAttention(model, variant=variant, backend=backend)(batch.to(torch.device(DEVICE)))
    assert backend is not Backend.flash or isinstance(inputs["packed_plan"], SegmentPlan)  # not sliced in its place
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **inputs).logits.float().log_softmax(-1)
    labelled = batch.labels != IGNORE
    rows, index = (batch.teacher >= 0).nonzero(as_tuple=True)
    loss = F.nll_loss(logits[labelled], batch.labels[labelled]) + (logits[rows, batch.teacher[rows, index]] - logits[rows, index]).square().mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


def assert_close(found, expected, tolerance):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert (found[1] - expected[1]).norm() < tolerance * expected[1].norm()


@pytest.mark.parametrize("variant", MaskVariant)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_flex_and_sliced_in_float32(family, window, variant, checkpointing):
    batch = random_batch([[(30, 200)], [(9, 60), (5, 90)]], n=8, window=window, multiple_of=128)
    how = dict(batch=batch, variant=variant, dtype=torch.float32)
    expected = loss_and_gradient(family, Backend.dense, **how)
    for backend in (Backend.flex, Backend.sliced):
        assert_close(loss_and_gradient(family, backend, checkpointing=checkpointing, **how), expected, 2e-3)


@pytest.mark.parametrize("backend", [Backend.flex, Backend.flash, Backend.sliced])
@pytest.mark.parametrize("variant", MaskVariant)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_the_oracle_is(family, variant, backend):
    """flash aligns its masks bottom-right, with more keys than queries in most groups."""
    batch = random_batch([[(60, 40)], [(30, 24), (40, 30)]], n=8, window=3, multiple_of=64)  # few copied keys
    exact = loss_and_gradient(family, Backend.dense, batch=batch, variant=variant, dtype=torch.float32)
    found = loss_and_gradient(family, backend, batch=batch, variant=variant, dtype=torch.bfloat16)
    assert_close(found, exact, 5e-2)


REAL = dict(
    hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2, initializer_range=0.05, max_position_embeddings=2048
)


@pytest.mark.parametrize(
    "backend, dtype, tolerance",
    [
        (Backend.flex, torch.float32, 2e-3),
        (Backend.sliced, torch.float32, 2e-3),
        (Backend.flex, torch.bfloat16, 5e-2),
        (Backend.flash, torch.bfloat16, 5e-2),
        (Backend.sliced, torch.bfloat16, 5e-2),
    ],
)
@pytest.mark.parametrize("variant", MaskVariant)
def test_the_packed_loss_at_a_real_models_sizes(variant, backend, dtype, tolerance):
    """Heads of 64, rows of 1,500 tokens, windows of 16 blocks of 16: a block mask with many empty, partial and full tiles."""
    batch = random_batch([[(100, 600), (30, 40)], [(200, 500)]], n=16, window=16, multiple_of=128)

    def terms(backend, dtype):
        model = tiny_model("qwen2", seed=1, dtype=dtype, **REAL).train().to(DEVICE)
        consistency, ar = (1 / count for count in loss_counts(batch).tolist())
        found = PackedLoss(model, window=16, variant=variant, backend=backend)(
            batch.to(torch.device(DEVICE)), consistency_weight=consistency, ar_weight=ar
        )
        found.loss.backward()
        return found, torch.cat([p.grad.float().flatten() for p in model.parameters()])

    (exact, exact_gradient), (found, gradient) = terms(Backend.dense, torch.float32), terms(backend, dtype)
    assert_close((found.loss.item(), gradient), (exact.loss.item(), exact_gradient), tolerance)
    assert found.noisy_tokens.tolist() == exact.noisy_tokens.tolist()
    torch.testing.assert_close(found.consistency, exact.consistency, rtol=tolerance, atol=0.0)


def test_new_batches_and_lengths_do_not_compile_without_end():
    model = tiny_model("llama", seed=1, dtype=torch.float32, **WIDE, head_dim=16).train().to(DEVICE)
    attention, compiled = PackedAttention(model, backend=Backend.flex), []
    for round_ in range(3):
        for answer in (100, 200, 300):
            batch, inputs = attention(random_batch([[(9, answer)]], n=8, window=3, seed=round_, multiple_of=128).to(torch.device(DEVICE)))
            model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **inputs).logits.sum().backward()
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[1] == compiled[2]


def test_flash_refuses_float32():
    batch = random_batch([[(60, 40)]], n=8, window=3)
    with pytest.raises(ValueError, match="bfloat16 or float16 only"):
        loss_and_gradient("llama", Backend.flash, batch=batch, variant=MaskVariant.nc, dtype=torch.float32)


def test_auto_is_flex():
    assert PackedAttention(tiny_model("llama").to(DEVICE)).backend is Backend.flex
