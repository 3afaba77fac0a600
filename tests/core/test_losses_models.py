"""The packed loss on models of every make: logits changed behind the head, frozen and adapted heads, bf16, checkpointing, no gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM, PreTrainedModel

from jacobi_core.distillation import losses
from jacobi_core.distillation.packing import batch_rows, join_samples
from tests.core.packed_rows import assert_same, gradients, loop, packed_loss, random_rows
from tests.core.tiny import VOCABULARY, tiny_model


def logit_changers() -> Sequence[PreTrainedModel]:
    shape = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    shape |= dict(initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return (
        GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=4.0)),
        CohereForCausalLM(CohereConfig(**shape, logit_scale=0.25)),
        Gemma2ForCausalLM(
            Gemma2Config(**shape, head_dim=8, layer_types=["full_attention"] * 2, final_logit_softcapping=5.0, attn_logit_softcapping=None)
        ),
    )


@pytest.mark.parametrize("which", [0, 1, 2], ids=["granite", "cohere", "gemma2"])
def test_models_that_change_their_logits_behind_the_head(monkeypatch, caplog, which):
    torch.manual_seed(1)
    model = logit_changers()[which].double().eval()
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 6 * VOCABULARY)
    batch = batch_rows([join_samples(random_rows(2, seed=1)), *random_rows(1, seed=2)], multiple_of=8)
    with caplog.at_level(logging.INFO, losses.__name__):
        loss = packed_loss(model)
    assert not loss.head_is_plain
    (said,) = [r.message for r in caplog.records if r.name == losses.__name__]
    assert model.config.model_type in said
    assert_same(model, loss(batch), loop(model, batch))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as peft wraps one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.b = nn.Linear(2, base.out_features, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("adapted", [False, True])
def test_frozen_and_adapted_heads(monkeypatch, adapted):
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 4 * VOCABULARY)
    model = tiny_model(tied=False, seed=6).requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    if adapted:
        model.lm_head = Adapted(model.lm_head)
    batch = batch_rows(random_rows(2, seed=5))
    assert_same(model, packed_loss(model)(batch), loop(model, batch))
    assert model.get_input_embeddings().weight.grad is None


def test_adapters_injected_by_peft():
    """As training has them: the model stays the class it was."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    plain = tiny_model(tied=False, seed=6)
    model = peft.inject_adapter_in_model(config, tiny_model(tied=False, seed=6)).double().train()
    assert type(model) is type(plain) and any(".lora_A." in name for name, _ in model.named_parameters())
    loss = packed_loss(model)
    assert loss.head_is_plain
    assert model.training
    model.eval()  # no dropout
    batch = batch_rows(random_rows(2, seed=5))
    assert_same(model, loss(batch), loop(model, batch))


def test_without_gradients_none_is_taken(monkeypatch):
    model = tiny_model(seed=6)
    loss, batch = packed_loss(model), batch_rows(random_rows(2, seed=5))
    with_gradient = loss(batch)

    def never(*args, **kwargs):
        raise AssertionError("a gradient was taken")

    monkeypatch.setattr(torch.autograd, "grad", never)
    with torch.no_grad():
        terms = loss(batch)
    assert not terms.loss.requires_grad
    torch.testing.assert_close(terms._asdict(), with_gradient._asdict())
    with pytest.raises(AssertionError):
        loss(batch)


def test_activation_checkpointing_changes_nothing():
    model, batch = tiny_model(seed=6).train(), batch_rows(random_rows(2, seed=5))
    loss = packed_loss(model)
    before = gradients(model, loss(batch).loss)
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(torch.stack([g.norm() for g in gradients(model, loss(batch).loss).values()]), torch.stack([g.norm() for g in before.values()]))


def test_bf16_parameters_and_fp32_loss(monkeypatch):
    batch = batch_rows(random_rows(3, seed=5))
    exact = tiny_model(seed=6)
    model = tiny_model(seed=6, dtype=torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    expected = gradients(exact, packed_loss(exact)(batch, ar_weight=0.01).loss)
    for tokens in (3, 1000):
        monkeypatch.setattr(losses, "CHUNK_LOGITS", tokens * VOCABULARY)
        terms = packed_loss(model)(batch, ar_weight=0.01)
        assert terms.loss.dtype == terms.consistency.dtype == terms.ar.dtype == torch.float32
        for name, gradient in gradients(model, terms.loss).items():
            assert gradient.dtype == torch.bfloat16
            assert F.cosine_similarity(gradient.double().flatten(), expected[name].flatten(), dim=0) > 0.97, name


def test_the_scale_of_the_backward_counts_and_a_second_backward_is_refused():
    model, batch = tiny_model(seed=6), batch_rows(random_rows(2, seed=5))
    loss = packed_loss(model)
    once = gradients(model, loss(batch).loss)
    total = loss(batch).loss
    model.zero_grad()
    (4 * total).backward(retain_graph=True)  # a power of two: Qwen2's norm rounds to float32
    torch.testing.assert_close({name: p.grad / 4 for name, p in model.named_parameters()}, once)
    with pytest.raises(RuntimeError, match="earlier backward"):
        total.backward()


def test_construction_leaves_model_and_random_state_alone():
    model = tiny_model(seed=6).train()
    state = torch.get_rng_state()
    packed_loss(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
