"""The exported checkpoint's card: its snippet runs as it is written, with the export's own decoder."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from transformers import dynamic_module_utils

from jacobi_core import hub
from jacobi_core.decoding import hf_generate
from tasks import export_model
from tasks.export_model import ExportConfig


@pytest.fixture
def export(base_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = shutil.copytree(base_folder, tmp_path / "export")
    model, tokenizer = hub.load_model(folder), hub.load_tokenizer(folder)
    hub.save_checkpoint(model, tokenizer, folder, generation_config=model.generation_config, with_decoder=True, block_size=16)
    return folder


def test_the_cards_snippet_runs(export, monkeypatch):
    card = export_model._model_card(ExportConfig(block_size=16), {"source": "tiny", "licence": "other"}, 1000)
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    asked, real = [], hf_generate.generate
    monkeypatch.setattr(hf_generate, "generate", lambda model, ids, config, **rest: asked.append(config) or real(model, ids, config, **rest))
    monkeypatch.chdir(export)
    names: dict = {}
    exec(snippet.replace("max_new_tokens=256", "max_new_tokens=8"), names)
    assert [config.block_size for config in asked] == [16]
    assert 0 < names["output"].shape[1] - names["inputs"]["input_ids"].shape[1] <= 8
