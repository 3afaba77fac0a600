"""An exported checkpoint decodes in parallel by itself, through transformers alone, and only where its code is trusted."""

from __future__ import annotations

import builtins
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Tokenizer, dynamic_module_utils
from transformers.generation import TextStreamer

from jacobi_core.decoding.checkpoint_generate import generate_file
from jacobi_core.hub import save_checkpoint
from tests.core.tiny import random_prompts, tiny_model

PROMPTS = [torch.tensor([prompt]) for prompt in random_prompts(3, seed=2, shortest=2)]


class NoTokenizer:
    def save_pretrained(self, folder):
        """The tokenizer's files play no part here."""


@pytest.fixture
def export(tmp_path, monkeypatch):
    """Saves a model as an export does; transformers' copies of its code stay in this test's folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def save(model, *, with_decoder=True, block_size=None):
        folder = tmp_path / "export"
        save_checkpoint(model, NoTokenizer(), folder, generation_config=model.generation_config, with_decoder=with_decoder, block_size=block_size)
        return folder

    return save


def load(folder, *, trust):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, trust_remote_code=trust)


@pytest.fixture
def forwards(monkeypatch):
    """What our decoder was asked: (block size, forwards) per call."""
    calls = []
    import jacobi_core.decoding.hf_generate as hf

    def counted(model, input_ids, config, **kwargs):
        generation = real(model, input_ids, config, **kwargs)
        calls.append((config.block_size, generation.stats.forwards))
        return generation

    real = hf.generate
    monkeypatch.setattr(hf, "generate", counted)
    return calls


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_tokens_with_and_without_the_decoder(export, forwards, tied):
    folder = export(tiny_model(seed=3, tied=tied), block_size=8)
    plain = load(folder, trust=False)
    expected = [plain.generate(ids, do_sample=False, max_new_tokens=30).tolist() for ids in PROMPTS]
    assert forwards == []  # untrusted: no code of the checkpoint's ran
    assert "generate" not in vars(plain)
    ours = load(folder, trust=True)
    assert [ours.generate(ids, do_sample=False, max_new_tokens=30).tolist() for ids in PROMPTS] == expected
    assert [size for size, _ in forwards] == [8, 8, 8]  # what it was trained on


def test_settings_and_ways_of_calling(export, forwards):
    folder = export(tiny_model(seed=3))
    model, ids = load(folder, trust=True), PROMPTS[0]
    expected = type(model).generate(model, ids, do_sample=False, max_new_tokens=20).tolist()
    assert forwards == []
    greedy = GenerationConfig(do_sample=False, max_new_tokens=20)
    mask = torch.ones_like(ids)
    assert model.generate(ids, greedy).tolist() == expected
    assert model.generate(inputs=ids, generation_config=greedy).tolist() == expected
    assert model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=20, block_size=5).tolist() == expected
    assert model.generate(ids, do_sample=False, max_new_tokens=20, method="ar").tolist() == expected
    assert [size for size, _ in forwards] == [64, 64, 5, 1]


def test_without_a_decoder_there_is_no_code(export):
    folder = export(tiny_model(), with_decoder=False)
    assert not list(folder.rglob("*.py"))


def test_the_file_holds_no_code_of_the_decoder(export):
    folder = export(tiny_model(), block_size=16)
    (file,) = folder.rglob("*.py")
    assert file.relative_to(folder).as_posix() == "custom_generate/generate.py"
    text = file.read_text()
    assert "DECODING = {'block_size': 16}" in text
    assert len(text.splitlines()) < 30
    assert "torch" not in text
    # transformers would refuse to load it where an import is missing, with its own guess at the package's name
    assert dynamic_module_utils.get_imports(file) == []


class Collector(TextStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], False

    def put(self, value):
        self.given += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_prompt_and_the_answer(export):
    model = load(export(tiny_model(seed=3)), trust=True)
    streamer = Collector()
    answer = model.generate(PROMPTS[0], do_sample=False, max_new_tokens=20, streamer=streamer, block_size=5)
    assert streamer.given == answer[0].tolist()
    assert streamer.ended


@pytest.fixture(scope="module")
def letters():
    """A tokenizer whose token i is the i-th letter."""
    return Qwen2Tokenizer(vocab={chr(ord("A") + i): i for i in range(60)}, merges=[])


@pytest.mark.parametrize("where", ["argument", "generation_config"])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_a_stop_string_across_blocks_ends_the_text_where_transformers_ends_it(export, letters, where, block_size):
    model = load(export(tiny_model(seed=3)), trust=True)
    text = type(model).generate(model, PROMPTS[0], do_sample=False, max_new_tokens=24)[0, PROMPTS[0].shape[1] :].tolist()
    string = "".join(chr(ord("A") + i) for i in text[6:9])
    settings = dict(do_sample=False, max_new_tokens=24)
    if where == "argument":
        settings["stop_strings"] = [string]
    else:
        settings = {"generation_config": GenerationConfig(stop_strings=[string], **settings)}
    expected = type(model).generate(model, PROMPTS[0], tokenizer=letters, **settings)
    assert expected.shape[1] < PROMPTS[0].shape[1] + 24
    assert model.generate(PROMPTS[0], tokenizer=letters, block_size=block_size, **settings).tolist() == expected.tolist()
    with pytest.raises(ValueError, match="stop_strings: pass tokenizer"):
        model.generate(PROMPTS[0], **settings)


def test_an_assistant_model_is_refused(export):
    model = load(export(tiny_model(seed=3)), trust=True)
    with pytest.raises(ValueError, match="assistant_model: not supported"):
        model.generate(PROMPTS[0], do_sample=False, max_new_tokens=8, assistant_model=tiny_model())


def test_transformers_still_drops_streamers():
    """The reason for our own keyword: a streamer given to a custom loop is never called. When this fails, hand it on as it is."""
    seen = []

    def loop(model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None, streamer=None, **kwargs):
        seen.append(streamer)
        return input_ids

    tiny_model().generate(PROMPTS[0], do_sample=False, max_new_tokens=4, custom_generate=loop, streamer=Collector())
    assert seen == [None]


def test_a_callers_own_loop_goes_first(export):
    model = load(export(tiny_model(seed=3)), trust=True)
    assert (
        model.generate(PROMPTS[0], max_new_tokens=4, custom_generate=lambda model, input_ids, **_: input_ids + 1).tolist()
        == (PROMPTS[0] + 1).tolist()
    )


def test_a_missing_package_is_said_with_its_remedy(export, monkeypatch):
    model = load(export(tiny_model(seed=3)), trust=True)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "jacobi_core":
            raise ImportError("No module named 'jacobi_core'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install jacobi-forcing"):
        model.generate(PROMPTS[0], do_sample=False, max_new_tokens=4)


def test_a_searched_setting_is_the_default(export, monkeypatch):
    """All of it: what a call names goes first, and a call that names another method is not mixed with it."""
    folder = export(tiny_model(seed=3), block_size=8)
    decoding = {"method": "running_window", "block_size": 5, "ngram": True, "drafts": 2, "verification_size": 3, "pool_size": 4}
    (folder / "custom_generate" / "generate.py").write_text(generate_file(decoding=decoding))
    import jacobi_core.decoding.hf_generate as hf

    configs, real = [], hf.generate
    monkeypatch.setattr(hf, "generate", lambda model, ids, config, **more: configs.append(config) or real(model, ids, config, **more))
    model, plain = load(folder, trust=True), load(folder, trust=False)
    asked = {"do_sample": False, "max_new_tokens": 20}
    expected = plain.generate(PROMPTS[0], **asked).tolist()
    for more in ({}, {"ngram": False}, {"block_size": 3}, {"method": "ar"}, {"method": "jacobi", "block_size": 7}):
        assert model.generate(PROMPTS[0], **asked, **more).tolist() == expected
    found = [(c.method.value, c.block_size, c.ngram, c.drafts, c.verification_size) for c in configs]
    window = "running_window"
    assert found == [(window, 5, True, 2, 3), (window, 5, False, 2, 3), (window, 3, True, 2, 3), ("ar", 1, False, 1, 4), ("jacobi", 7, False, 1, 4)]
    own = model.generate(PROMPTS[0], **asked, custom_generate=lambda model, input_ids, **_: input_ids)  # a caller's own loop hears nothing of it
    assert own.tolist() == PROMPTS[0].tolist()
