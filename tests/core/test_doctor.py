"""The doctor finds what it must and nothing else: equality in fp64, ties told from defects, wrong decoders, unfair settings."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from jacobi_core.decoding import doctor
from jacobi_core.decoding.doctor import certify, eos_sources, method_configs, plain_greedy, unfair_settings
from jacobi_core.decoding.equivalence import Difference, tie_margin
from jacobi_core.decoding.verify import accepted_length
from tests.core.tiny import EOS, VOCABULARY, random_prompts, tiny_model, tiny_rules

PROMPTS = random_prompts(4, seed=5)


def run(model, *, sizes=(3, 8), cap=24):
    return certify(model, PROMPTS, method_configs(sizes, cap), rules=tiny_rules(model))


def test_every_method_is_certified_in_fp64():
    lines = []
    model = tiny_model(seed=3)
    certificate = certify(model, PROMPTS, method_configs((3, 8), 24), rules=tiny_rules(model), progress=lines.append)
    assert certificate.dtype == "float64"
    assert (certificate.equal_share, certificate.findings) == (1.0, [])
    names = ["jacobi", "running_window", "recycling", "multi_block", "mr", "mr+ngram", "mr+ngram+drafts", "mr+ngram+auto"]
    assert list(certificate.runs) == ["ar/1", *(f"{name}/{size}" for size in (3, 8) for name in names)]
    assert set(certificate.runs.values()) == {len(PROMPTS)}
    assert lines[0] == "float64 ar/1: 4 of 4 equal"
    assert len(lines) == len(certificate.runs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_decoder_that_accepts_one_token_too_many_is_a_defect(dtype, monkeypatch):
    monkeypatch.setattr("jacobi_core.decoding.text.accepted_length", lambda draft, p: min(len(draft), accepted_length(draft, p) + 1))
    certificate = run(tiny_model(seed=3, dtype=dtype))
    assert certificate.equal["ar/1"] == len(PROMPTS)  # AR drafts nothing
    assert {f.method for f in certificate.defects} >= {"jacobi", "running_window", "multi_block"}
    assert certificate.equal_share < 0.5


def test_the_witness_does_not_share_the_decoder(monkeypatch):
    """A decoder whose AR is wrong too is still found."""
    model = tiny_model(seed=3)

    def always_7(self, requests):
        return [torch.eye(VOCABULARY)[[7] * (1 + sum(map(len, chains)))] for _, chains in requests]

    monkeypatch.setattr("jacobi_core.decoding.cache.CachedForward.logits_of", always_7)
    monkeypatch.setattr("jacobi_core.decoding.cache.CachedForward.keep", lambda *_: None)
    certificate = run(model)
    assert certificate.equal["ar/1"] == 0
    assert len(certificate.defects) == sum(certificate.runs.values())


def test_the_witness_is_transformers_own_greedy():
    model = tiny_model(seed=3)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)[0, len(prompt) :]
        assert plain_greedy(model, ids[0], max_new_tokens=24, eos_ids=frozenset(EOS)).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("dtype", "margin", "largest", "kind"),
    [
        (torch.float64, 0.0, 20.0, "defect"),  # also an exact tie: in fp64 nothing may differ
        (torch.float64, 1e-12, 20.0, "defect"),
        (torch.float32, 0.9e-3, 20.0, "tie"),
        (torch.float32, 1.1e-3, 20.0, "defect"),
        (torch.bfloat16, 0.6, 20.0, "tie"),
        (torch.bfloat16, 0.7, 20.0, "defect"),
        (torch.bfloat16, 0.6, 10.0, "defect"),  # smaller logits are rounded finer
        (torch.float16, 0.1, 20.0, "defect"),
    ],
)
def test_ties_and_defects(dtype, margin, largest, kind):
    assert Difference(first_index=1, margin=margin, tolerance=tie_margin(dtype, largest), prefix=False).kind == kind
    assert Difference(first_index=1, margin=0.0, tolerance=tie_margin(dtype, largest), prefix=True).kind == "defect"


@pytest.mark.parametrize("tokens", [[6, 7], [6, 7, 8, 9]])
def test_an_answer_that_ends_elsewhere_is_no_tie(tokens):
    """However close the logits are where the shorter one ends."""
    model = tiny_model(dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()  # all logits equal
    finding = doctor._compare(model, torch.tensor([5]), torch.tensor([6, 7, 8]), torch.tensor(tokens), where=(0, "mr", 8))
    assert (finding.kind, finding.margin) == ("defect", 0.0)


def test_eos_ids_and_where_they_come_from():
    class Tokenizer:
        eos_token_id = 9

    model = tiny_model()
    model.generation_config.eos_token_id = [4, 7]
    assert eos_sources(model, Tokenizer()) == {3: ["config"], 4: ["generation_config", "config"], 7: ["generation_config"], 9: ["tokenizer"]}
    assert set(eos_sources(model, Tokenizer())) == tiny_rules(model, eos_ids=(9,)).eos_ids
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert eos_sources(model) == {}


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.3}, {"do_sample": True}, {"min_new_tokens": 4}, {"num_beams": 2}, {"forced_eos_token_id": 3}, {"suppress_tokens": [8]}],
)
def test_unfair_generation_settings_are_named(settings):
    (line,) = unfair_settings(GenerationConfig(**settings))
    assert next(iter(settings)) in line


def test_neutral_generation_settings_are_not():
    assert unfair_settings(GenerationConfig(do_sample=False, repetition_penalty=1.0, num_beams=1, min_length=0, eos_token_id=[3, 4])) == []
    assert unfair_settings(tiny_model().generation_config) == []


def test_no_prompts_is_refused():
    with pytest.raises(ValueError, match="prompts"):
        certify(tiny_model(), [], method_configs((4,), 8), rules=tiny_rules(tiny_model()))
