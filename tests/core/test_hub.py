"""A checkpoint is loaded whole or refused: transformers would fill the gaps with random numbers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from jacobi_core.hub import load_model
from tests.core.tiny import tiny_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_checkpoint_with_a_hole_is_refused(tmp_path, tied, name):
    model = tiny_model(tied=tied)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if tied and name == "lm_head.weight":  # a tied head is no hole
        assert name not in tensors
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(load_model(tmp_path, dtype="float64")(ids).logits, model(ids).logits)
        return
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{tmp_path}: the checkpoint lacks 1 weights \({name}\); give a complete one"):
        load_model(tmp_path)
