"""What the plans of sliced, flash and flex say, pair by pair, against the dense mask; and what is refused. Needs hardly a model."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from jacobi_core.distillation import backends
from jacobi_core.distillation.attention import dense_mask
from jacobi_core.distillation.attention_variant import Backend, MaskVariant
from jacobi_core.distillation.backends import PackedAttention
from jacobi_core.distillation.flex import FlexPlan, rule_block_mask
from jacobi_core.distillation.loss_plan import plan_loss
from jacobi_core.distillation.model_order import model_order
from jacobi_core.distillation.packed_interface import packed_attention
from jacobi_core.distillation.segments import SegmentPlan, TooManyCopies
from jacobi_core.distillation.slices import SlicedPlan
from tests.core.packed_batches import PLANS, ROWS, SHAPES, logits_of, loop_kernel, random_batch
from tests.core.tiny import tiny_model


@settings(max_examples=60, deadline=None)
@given(
    rows=SHAPES,
    n=st.integers(1, 7),
    window=st.integers(1, 4),
    chunk=st.integers(1, 30),
    short=st.sampled_from([0, 12, 100]),
    variant=st.sampled_from(MaskVariant),
)
def test_pieces_and_segments_are_the_rule(rows, n, window, chunk, short, variant):
    """Put together again they are the dense mask, pair by pair; padding apart."""
    batch = model_order(random_batch(rows, n=n, window=window))
    tokens, real = batch.input_ids.numel(), batch.sample.flatten() >= 0
    expected = torch.block_diag(*dense_mask(batch, variant)[:, 0]).bool()
    found = torch.zeros(tokens, tokens, dtype=torch.bool)
    asked = torch.zeros(tokens, dtype=torch.long)
    for piece in SlicedPlan.of(batch, variant, chunk=chunk, short=short).pieces:
        queries, keys = torch.arange(*piece.queries), torch.cat([torch.arange(*span) for span in piece.keys])
        assert len(queries) <= max(chunk, short) or piece.mask is None
        asked[queries] += 1
        found[queries[:, None], keys] = torch.ones(len(queries), len(keys), dtype=torch.bool).tril() if piece.mask is None else piece.mask
    assert torch.equal(asked, real.long())
    assert torch.equal(found[real], expected[real])

    plan, found = PLANS["flash"](batch, variant), torch.zeros(tokens, tokens, dtype=torch.bool)
    for a, b, c, d in zip(*[t.tolist()[i:] for t in (plan.cu_q, plan.cu_k) for i in (0, 1)], strict=False):
        found[torch.arange(a, b)[:, None], plan.keys[c:d]] = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
    assert plan.cu_q[-1] == tokens
    assert torch.equal(found[real], expected[real])


def test_model_order_moves_tokens_and_keeps_teachers():
    batch = random_batch(ROWS, n=3, window=2)
    for row in range(2):  # as packing does not do it: any order will do
        shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(row))
        for name, field in vars(batch).items():
            field[row] = field[row, shuffled]
            if name == "teacher":
                field[row] = torch.where(field[row] >= 0, shuffled.argsort()[field[row].clamp(min=0)], -1)
    ordered = model_order(batch)
    for row in range(2):

        def seen_from(b, row=row):
            """Every token and its teacher, whatever their order."""
            fields = torch.stack([field[row] for name, field in vars(b).items() if name != "teacher"], 1).tolist()
            return sorted((token, fields[t] if t >= 0 else []) for token, t in zip(fields, b.teacher[row].tolist(), strict=True))

        assert seen_from(ordered) == seen_from(batch)
        real = ordered.sample[row] >= 0
        place = torch.stack([ordered.sample[row], ordered.kind[row] == 1, ordered.position_ids[row]], 1)[real].tolist()
        assert place == sorted(place)
        assert not real[len(place) :].any()


@pytest.mark.parametrize("variant", MaskVariant)
@pytest.mark.parametrize("window", [1, 3])
def test_flex_mask_is_the_rule(variant, window):
    batch = model_order(random_batch([[(3, 60)], [(5, 40), (2, 30)]], n=4, window=window, multiple_of=128))
    block_mask, expected = rule_block_mask(batch, variant), dense_mask(batch, variant)
    assert FlexPlan(block_mask).shape == tuple(batch.input_ids.shape)
    assert block_mask.shape[1] == 1  # one for all heads
    assert torch.equal(create_mask(block_mask.mask_mod, 2, None, len(batch), len(batch), device="cpu"), expected)
    q, k, v = torch.randn(2, 4, len(batch), 16), torch.randn(2, 2, len(batch), 16), torch.randn(2, 2, len(batch), 16)
    found = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)  # eager: it has no backward on the CPU
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, attn_mask=expected, enable_gqa=True))


def test_block_masks_are_compiled_at_most_once_per_shape():
    torch._dynamo.reset()
    graphs, after = [], []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    create = torch.compile(create_block_mask, backend=count)
    for seed in range(2):
        for multiple_of in (128, 256, 384):
            batch = model_order(random_batch([[(3, 50 + seed)]], n=4, window=2, seed=seed, multiple_of=multiple_of))
            found = rule_block_mask(batch, MaskVariant.nc, create=create)
            assert torch.equal(found.to_dense(), rule_block_mask(batch, MaskVariant.nc).to_dense())  # what is traced is the rule, too
            assert torch.equal(create_mask(found.mask_mod, 1, None, len(batch), len(batch), device="cpu"), dense_mask(batch))
        after.append(len(graphs))
    assert after[0] == after[1] > 0
    torch._dynamo.reset()


def test_tiles_are_sparse_in_model_order():
    """In packed order noisy and clean blocks alternate, and hardly a tile of flex is empty."""
    batch = random_batch([[(16, 1008)]], n=16, window=4, multiple_of=128)
    assert rule_block_mask(model_order(batch), MaskVariant.nc).sparsity() > rule_block_mask(batch, MaskVariant.nc).sparsity() + 10


def test_what_a_machine_or_model_cannot_do_is_refused_with_an_alternative():
    model = tiny_model("qwen2")
    assert PackedAttention(model).backend is Backend.sliced
    for backend, why in ((Backend.flex, "no backward there.*attention=sliced"), (Backend.flash, "CUDA only.*attention=sliced")):
        with pytest.raises(ValueError, match=why):
            PackedAttention(model, backend=backend)
    sliding = tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    for backend in (Backend.dense, Backend.sliced):
        with pytest.raises(ValueError, match="sliding"):
            PackedAttention(sliding, backend=backend)
    batch = model_order(random_batch([[(8, 60)]], n=2, window=1))
    with pytest.raises(ValueError, match="attention_dropout=0"):
        PLANS["flash"](batch, MaskVariant.nc).attend(None, *[torch.zeros(1, 1, len(batch), 4)] * 3, scaling=None, dropout=0.1)


@pytest.mark.parametrize(
    ("window", "variant", "keys"), [(16, MaskVariant.nc, 9.0), (64, MaskVariant.nc, 3.0), (16, MaskVariant.nc_ic, None), (1, MaskVariant.nc, None)]
)
def test_what_flash_copies_of_a_long_row(window, variant, keys):
    batch = model_order(random_batch([[(128, 8128)]], n=16, window=window))
    assert len(batch) == 16_384
    if keys is None:
        with pytest.raises(TooManyCopies, match=r"1\d\d\.\d keys per token \(memory bears 16\): use attention=flex or sliced"):
            SegmentPlan.of(batch, variant, kernel=loop_kernel)
    else:
        assert len(SegmentPlan.of(batch, variant, kernel=loop_kernel).keys) / len(batch) == pytest.approx(keys, abs=0.3)


def test_gradients_of_copied_keys_are_not_rounded_one_by_one(monkeypatch):
    """In bfloat16 256 + 1 is 256."""

    def as_cuda_does_it(self, dim, index, source):
        for i, row in zip(index.tolist(), source, strict=True):
            self[i] += row
        return self

    monkeypatch.setattr(torch.Tensor, "index_add_", as_cuda_does_it)
    heads = [torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    plan = SegmentPlan((1, 1), torch.zeros(1000, dtype=torch.long), None, None, (1, 1000), lambda q, k, v, *_: q + k.sum(0) + v.sum(0))
    plan.attend(None, *heads, scaling=None, dropout=0.0).sum().backward()
    assert [head.grad.item() for head in heads] == [1, 1000, 1000]


def test_a_batch_with_too_many_copies_is_computed_by_sliced_and_said_once(monkeypatch, caplog):
    monkeypatch.setattr(backends, "_why_not", lambda backend, model: None)
    monkeypatch.setattr(backends, "flash_kernel", lambda: loop_kernel)
    model = tiny_model("llama", seed=1)
    attention, plans = PackedAttention(model, backend=Backend.flash), []
    with caplog.at_level(logging.WARNING, backends.__name__):
        for answer in (200, 20, 180):
            batch, inputs = attention(random_batch([[(8, answer)]], n=2, window=1))
            plans.append(type(inputs["packed_plan"]))
            with torch.no_grad():
                found = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **inputs).logits
                _, expected = logits_of(model, batch)
            torch.testing.assert_close(found[batch.sample >= 0], expected[batch.sample >= 0])
    assert plans == [SlicedPlan, SegmentPlan, SlicedPlan]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "keys per token" in said and "computed by sliced" in said


@pytest.mark.parametrize("plan", [SlicedPlan.of, PLANS["flash"], lambda batch, variant: plan_loss(batch, window=2, limit=9)])
def test_a_plan_reads_its_batch_from_the_device_once(plan, monkeypatch):
    batch, read, cpu = model_order(random_batch(ROWS, n=3, window=2)), [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: read.append(self.shape) or cpu(self))
    plan(batch, MaskVariant.nc)
    assert len(read) == 1


def test_a_mask_of_the_wrong_kind_is_refused():
    model, batch = tiny_model("qwen2"), random_batch(ROWS, n=3, window=2)
    attention = PackedAttention(model, backend=Backend.sliced)
    ordered, inputs = attention(batch)

    def run(**changed):
        return model(input_ids=ordered.input_ids, position_ids=ordered.position_ids, use_cache=False, **(inputs | changed))

    with pytest.raises(ValueError, match=r"BlockMask, got a Tensor"):
        FlexPlan(dense_mask(ordered))
    with pytest.raises(ValueError, match="is a BlockMask"):
        run(attention_mask=rule_block_mask(ordered, MaskVariant.nc), packed_plan=None)
    with pytest.raises(ValueError, match=r"packed_plan is a Tensor, not a plan"):
        run(packed_plan=dense_mask(ordered))
    with pytest.raises(ValueError, match="attention_mask besides"):
        run(attention_mask=dense_mask(ordered))
    with pytest.raises(ValueError, match="did not get its batch's plan"):
        run(packed_plan=None)
    with pytest.raises(ValueError, match="the plan is for a batch of"):
        model(input_ids=ordered.input_ids[:1], position_ids=ordered.position_ids[:1], use_cache=False, **inputs)
    heads = [torch.zeros(2, 1, len(ordered), 8)] * 3
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        with pytest.raises(ValueError, match=f"asks for {name}"):
            packed_attention(model, *heads, **inputs, **{name: 1.0})
