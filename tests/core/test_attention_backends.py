"""sliced and flash (by a CPU twin of its kernel) inside models against the dense oracle: outputs, gradients, reach, ordinary decoding.

The plans themselves, flex and refusals: test_attention_plans.py; the rule: test_distillation.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.distillation.attention import dense_mask
from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from jacobi_core.distillation.backends import PackedAttention
from jacobi_core.distillation.model_order import model_order
from jacobi_core.distillation.packing import IGNORE, PackedRow
from jacobi_core.distillation.slices import SlicedPlan
from tests.core.packed_batches import PLANS, ROWS, SHAPES, logits_of, loss_and_gradient, random_batch
from tests.core.tiny import FAMILIES, VOCABULARY, tiny_model


def assert_equals_oracle(model, batch, variant, plan):
    expected, expected_gradient = loss_and_gradient(model, batch, variant=variant)
    found, gradient = loss_and_gradient(model, batch, variant=variant, plan=plan)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("variant", MaskVariant)
@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_the_oracle(family, window, variant, plan):
    """Grouped heads, several samples in a row, rows of different length. Every token's logits, not only those with a loss."""
    model, batch = tiny_model(family, seed=1).train(), random_batch(ROWS, n=3, window=window)
    assert_equals_oracle(model, batch, variant, PLANS[plan])
    ordered = model_order(batch)
    _, expected = logits_of(model, ordered, variant=variant)
    _, found = logits_of(model, ordered, variant=variant, plan=PLANS[plan])
    real = ordered.sample >= 0
    torch.testing.assert_close(found[real], expected[real])
    assert found.isfinite().all()


@pytest.mark.parametrize("plan", PLANS)
def test_gradient_checkpointing_changes_nothing(plan):
    batch = random_batch(ROWS, n=4, window=2)
    plain = loss_and_gradient(tiny_model("qwen3", seed=2).train(), batch, plan=PLANS[plan])
    model = tiny_model("qwen3", seed=2).train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    torch.testing.assert_close(loss_and_gradient(model, batch, plan=PLANS[plan]), plain)


@settings(max_examples=12, deadline=None)
@given(
    rows=SHAPES,
    n=st.integers(1, 7),
    window=st.integers(1, 4),
    chunk=st.integers(1, 30),
    short=st.sampled_from([0, 12]),
    variant=st.sampled_from(MaskVariant),
)
def test_any_shape_and_chunk_equals_the_oracle(rows, n, window, chunk, short, variant):
    batch = random_batch(rows, n=n, window=window)
    assert_equals_oracle(tiny_model("llama", seed=3).train(), batch, variant, lambda b, v: SlicedPlan.of(b, v, chunk=chunk, short=short))


@pytest.mark.parametrize("variant", MaskVariant)
@pytest.mark.parametrize("plan", [None, *PLANS])
def test_no_token_changes_a_logit_it_may_not_reach(plan, variant):
    model, batch = tiny_model("qwen2", seed=4), model_order(random_batch([[(2, 7), (1, 4)]], n=2, window=2))
    mask = dense_mask(batch, variant)[0, 0]
    assert torch.equal((mask.double() @ mask.double()) > 0, mask)  # what is seen by what a token sees, it sees: so for any number of layers
    with torch.no_grad():
        _, before = logits_of(model, batch, variant=variant, plan=PLANS.get(plan))
        for token in range(len(batch)):
            other = copy.deepcopy(batch)
            other.input_ids[0, token] = (other.input_ids[0, token] + 1) % VOCABULARY
            _, after = logits_of(model, other, variant=variant, plan=PLANS.get(plan))
            changed = (after != before)[0].any(-1)
            assert not (changed & ~mask[:, token] & (batch.sample[0] >= 0)).any()
            assert changed[token] or batch.sample[0, token] < 0


@pytest.mark.parametrize("plan", PLANS)
def test_padding_and_bucket_size_have_no_effect(plan):
    model, found = tiny_model("qwen3", seed=5), []
    for multiple_of in (1, 16, 64):
        batch = random_batch(ROWS, n=3, window=2, multiple_of=multiple_of)
        batch.input_ids[batch.sample < 0] = multiple_of % VOCABULARY
        with torch.no_grad():
            ordered, logits = logits_of(model, batch, plan=PLANS[plan])
        found.append(logits[ordered.sample >= 0])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("plan", PLANS)
def test_a_row_of_nothing_but_padding_gives_nothing(plan):
    """What a rank is fed that has no rows left."""
    model, batch = tiny_model("qwen2", seed=5).train(), random_batch(ROWS, n=3, window=2)
    alone = PackedRow(**{name: field[:1] for name, field in vars(batch).items()})
    expected = loss_and_gradient(model, alone)
    for name, field in vars(batch).items():
        field[1] = {"sample": -1, "block": -1, "window": -1, "labels": IGNORE, "teacher": -1}.get(name, 0)
    torch.testing.assert_close(loss_and_gradient(model, batch, plan=PLANS[plan]), expected)


def test_without_a_plan_a_model_decodes_as_before():
    model = tiny_model("llama", seed=6)
    prompt = torch.randint(5, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    padded = torch.ones_like(prompt)
    padded[1, :3] = 0
    own = torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    own |= torch.eye(7, dtype=torch.bool)

    def outputs():
        with torch.no_grad():
            text = model.generate(prompt, attention_mask=padded, max_new_tokens=12, do_sample=False)
            return [text, *(model(prompt, attention_mask=mask).logits[:, -1] for mask in (None, padded, own))]

    before = outputs()
    attention = PackedAttention(model, backend=Backend.sliced)
    batch, inputs = attention(random_batch(ROWS, n=3, window=2))
    model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **inputs).logits.sum().backward()
    for a, b in zip(outputs(), before, strict=True):
        assert torch.equal(a, b)


def test_two_attentions_may_share_a_model():
    model, batch = tiny_model("qwen2", seed=7), random_batch(ROWS, n=3, window=2)
    both = [PackedAttention(model, backend=backend) for backend in (Backend.dense, Backend.sliced)]
    losses = []
    for attention in (*both, *both):
        ordered, inputs = attention(batch)
        logits = model(input_ids=ordered.input_ids, position_ids=ordered.position_ids, use_cache=False, **inputs).logits
        losses.append(F.cross_entropy(logits.flatten(0, 1), ordered.labels.flatten(), ignore_index=IGNORE))
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(4))


def test_dropout_is_the_same_in_forward_and_backward():
    """The backward pass computes each piece again: with other draws the gradient would be another function's."""
    batch = model_order(random_batch([[(2, 6)]], n=2, window=2, multiple_of=1))
    plan = SlicedPlan.of(batch, MaskVariant.nc, chunk=3, short=0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, len(batch), 4, dtype=torch.float64, generator=generator, requires_grad=True) for heads in (2, 1, 1))

    def attend(*heads):
        torch.manual_seed(3)
        return plan.attend(None, *heads, scaling=None, dropout=0.4)

    assert not torch.equal(attend(q, k, v), plan.attend(None, q, k, v, scaling=None, dropout=0.0))
    assert torch.autograd.gradcheck(attend, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close_to_the_oracle(dtype):
    exact, batch = tiny_model("qwen3", seed=8, initializer_range=0.1).train(), random_batch(ROWS, n=3, window=2)
    model = copy.deepcopy(exact).to(dtype)
    expected, expected_gradient = loss_and_gradient(exact, batch)
    found, gradient = loss_and_gradient(model, batch, plan=PLANS["sliced, cut"])
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    assert abs(found.double() - expected) < tolerance * expected
    assert (gradient.double() - expected_gradient).norm() < tolerance * expected_gradient.norm()
    assert gradient.dtype is dtype
