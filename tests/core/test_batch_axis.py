"""Candidates on the batch axis give what candidates behind a mask give. sdpa without a mask stands in for flash-attn, which needs CUDA."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import flex_attention

from jacobi_core.decoding.batch_axis import BatchAxisForward, takes_masks
from jacobi_core.decoding.cache import CachedForward, side_by_side
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.flex_mask import block_mask
from jacobi_core.decoding.forwards import forward_for
from tests.core.loop import COPYING, decode, decodings, same_as_growing_cache
from tests.core.tiny import FAMILIES, tiny_model

MODELS = {family: tiny_model(family, seed=1) for family in FAMILIES}


@settings(max_examples=80, deadline=None)
@given(drawn=decodings())
def test_same_text_as_behind_a_mask(drawn):
    family, prompt, config = drawn
    model = MODELS[family]
    same_as_growing_cache(model, BatchAxisForward(model), prompt, config)


def test_the_model_gets_no_mask_and_the_cache_stays_one_row():
    model = tiny_model(seed=1)
    config = DecodingConfig(method=Method.mr, block_size=8, max_new_tokens=60, ngram=True)
    forward, rows = BatchAxisForward(model), []
    keep = forward.keep

    def look(module, args, kwargs):
        assert kwargs["attention_mask"] is None
        rows.append(kwargs["input_ids"].shape[0])

    def kept(verdicts):
        keep(verdicts)
        if verdicts != [None]:
            assert {layer.keys.shape[0] for layer in forward.cache.layers} == {1}

    model.register_forward_pre_hook(look, with_kwargs=True)
    forward.keep = kept
    decode(model, forward, COPYING, config)
    assert rows[0] == 1  # the prompt is read once
    assert max(rows) > 1


@pytest.mark.parametrize(
    ("implementation", "masks", "chosen"),
    [
        ("sdpa", True, CachedForward),
        ("jacobi_packed", True, CachedForward),  # a model that trained on packed rows
        ("eager", True, CachedForward),
        ("flash_attention_2", False, BatchAxisForward),
    ],
)
def test_the_forward_follows_the_attention(implementation, masks, chosen):
    model = tiny_model(seed=1)
    model.config._attn_implementation = implementation  # a name only: flash-attn itself is not installed here
    assert takes_masks(model) is masks
    assert type(forward_for(model, DecodingConfig(), 64)) is chosen


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_block_mask_is_the_dense_mask():
    """torch's own flex attention, uncompiled, against SDPA with the dense mask; transformers passes a BlockMask through as it is.

    Not through a model: transformers compiles flex, and torch 2.13 on a CPU fails to compile it once the shapes change.
    """
    visible = torch.cat([side_by_side(9, 1, (4, 3)), side_by_side(9, 2, (6,))])
    query, key, value = torch.randn(3, 2, 1, 17, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
    query = query[:, :, :8]
    mask = block_mask(visible)
    assert len(mask.shape) == 4  # what transformers recognises a prepared mask by
    found = flex_attention(query, key, value, block_mask=mask)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible))
