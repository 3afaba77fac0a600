"""The chunked packed loss, values and gradients, against a loop over tokens and all logits at once, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_core.distillation import losses
from jacobi_core.distillation.losses import loss_counts
from jacobi_core.distillation.packing import IGNORE, PackedRow, batch_rows, join_samples
from tests.core.packed_rows import assert_same, gradients, loop, packed_loss, random_rows, shuffled
from tests.core.tiny import EOS, VOCABULARY, tiny_model


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    layout=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    n=st.integers(1, 6),
    window=st.integers(1, 3),
    tokens_per_chunk=st.sampled_from([1, 3, 8, 10**6]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    weights=st.sampled_from([(1.0, 1.0), (0.02, 0.3), (1.0, 0.0), (0.0, 1.0)]),
    reorder=st.booleans(),
    tied=st.booleans(),
)
def test_values_and_gradients_equal_a_loop_over_tokens(seed, layout, n, window, tokens_per_chunk, temperature, weights, reorder, tied):
    model = tiny_model(tied=tied, seed=6)
    samples = iter(random_rows(sum(layout), seed=seed, n=n, window=window))
    batch = batch_rows([join_samples([next(samples) for _ in range(count)]) for count in layout], multiple_of=8)
    batch = shuffled(batch, seed) if reorder else batch
    options = dict(consistency_weight=weights[0], ar_weight=weights[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_LOGITS", tokens_per_chunk * VOCABULARY)
        found = packed_loss(model, temperature=temperature, window=window)(batch, **options)
    assert_same(model, found, loop(model, batch, temperature=temperature, window=window, **options))
    assert loss_counts(batch).tolist() == [int(found.noisy_tokens.sum()), int((batch.labels != IGNORE).sum())]


@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
def test_every_logit_is_computed_once_and_few_at_a_time(monkeypatch, tokens):
    monkeypatch.setattr(losses, "CHUNK_LOGITS", tokens * VOCABULARY + 7)
    model = tiny_model(seed=6)
    batch = batch_rows([join_samples(random_rows(3, seed=1)), *random_rows(1, seed=2)], multiple_of=64)
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: calls.append(out.numel() // VOCABULARY))
    loss = packed_loss(model)
    calls.clear()  # the look at construction
    loss(batch).loss.backward()
    assert max(calls) <= max(tokens, 2)  # a clean token and the noisy one it teaches stay together
    needed = (batch.labels != IGNORE) | (batch.teacher >= 0)  # every teacher of these rows is labelled
    assert sum(calls) == int(needed.sum())
    assert len(calls) <= math.ceil(sum(calls) / max(1, tokens - 1))


def test_several_noisy_tokens_of_one_teacher(monkeypatch):
    """Not what packing does today, but nothing forbids it."""
    model = tiny_model(seed=6)
    batch = batch_rows(random_rows(1, seed=3, n=6, kind="reverse"))
    batch.teacher[batch.teacher >= 0] = batch.teacher.max()
    for tokens in (2, 100):
        monkeypatch.setattr(losses, "CHUNK_LOGITS", tokens * VOCABULARY)
        assert_same(model, packed_loss(model)(batch), loop(model, batch))


def test_teacher_gets_no_gradient():
    """With only the consistency loss, no clean token's hidden state gets a gradient from the head."""
    model = tiny_model(seed=6)
    batch = batch_rows(random_rows(1, seed=5, kind="reverse"))
    kept = []

    def keep(module, args, output):
        output.last_hidden_state.retain_grad()
        kept.append(output.last_hidden_state)

    loss = packed_loss(model)
    model.base_model.register_forward_hook(keep)
    loss(batch, ar_weight=0.0).loss.backward()
    assert torch.equal(kept[0].grad[0].abs().sum(-1) > 0, batch.teacher[0] >= 0)
    assert (batch.teacher >= 0).any()


def test_samples_in_one_row_or_in_many_rows_or_padded():
    model = tiny_model("llama", seed=6)
    rows = random_rows(4, seed=9)
    results = []
    for layout in ([rows], [[r] for r in rows], [rows[:1], rows[1:]]):
        terms = packed_loss(model)(batch_rows([join_samples(r) for r in layout], multiple_of=32))
        results.append((terms, gradients(model, terms.loss)))
    for terms, gradient in results[1:]:
        torch.testing.assert_close(terms._asdict(), results[0][0]._asdict())
        torch.testing.assert_close(gradient, results[0][1])


def test_8x1_is_1x8_is_2x4():
    """Divided by counts over the global batch, gradients do not know how rows were grouped."""
    model = tiny_model(seed=6)
    rows = random_rows(8, seed=11)
    consistency, ar = loss_counts(batch_rows(rows)).tolist()
    loss, found = packed_loss(model), []
    for size in (1, 8, 4):
        model.zero_grad()
        for at in range(0, 8, size):
            loss(batch_rows(rows[at : at + size], multiple_of=8), consistency_weight=1 / consistency, ar_weight=2 / ar).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_rows_without_noise_or_without_labels_or_without_any_loss():
    model = tiny_model(tied=False, seed=6)
    quiet, unlabelled, neither = (batch_rows(random_rows(1, seed=5, kind="reverse")) for _ in range(3))
    for batch in (quiet, neither):
        batch.teacher[:] = -1
    for batch in (unlabelled, neither):
        batch.labels[:] = IGNORE
    for batch in (quiet, unlabelled, neither):
        assert_same(model, packed_loss(model)(batch), loop(model, batch))  # gradients are zeros, not None: ranks must agree on what they reduce
    assert packed_loss(model)(neither).loss == 0


@pytest.mark.parametrize("token", [0, EOS[0]])  # what batches are padded with, and the model's pad id (also an EOS)
def test_a_final_token_that_is_the_pad_id_keeps_its_loss(token):
    model = tiny_model(seed=6)
    assert model.config.pad_token_id == EOS[0]
    (row,) = random_rows(1, seed=7, last=token)
    terms = packed_loss(model)(batch_rows([row], multiple_of=64))
    clean = row.input_ids[(row.kind != 1)]
    logits = model(input_ids=clean.unsqueeze(0)).logits[0]
    prompt = int((row.kind == 0).sum())
    torch.testing.assert_close(terms.ar, F.cross_entropy(logits[prompt - 1 : -1], clean[prompt:], reduction="sum").detach())


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.sampled_from([2, 3, 8]), kind=st.sampled_from(["linear", "random", "reverse"]))
def test_nothing_past_eos_matters(seed, n, kind):
    """Whatever follows an answer's EOS in its row leaves its losses alone, and the last token is never an input of a loss."""
    model = tiny_model(seed=6)
    (row,) = random_rows(1, seed=seed, n=n, kind=kind, last=EOS[1])
    noise = PackedRow(**{**vars(row), "input_ids": torch.randint(5, VOCABULARY, (len(row),))})
    alone, followed = batch_rows([row]), batch_rows([join_samples([row, noise])])
    followed.labels[:, len(row) :], followed.teacher[:, len(row) :] = IGNORE, -1
    assert_same(model, packed_loss(model)(alone), packed_loss(model)(followed))
    final = row.position_ids == row.position_ids.max()
    assert (row.labels[final] == IGNORE).all()
    assert (row.teacher[final] == -1).all()
