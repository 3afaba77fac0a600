"""An export that decodes with the searched setting: the same weights, another default."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

import jacobi_core.decoding.hf_generate as hf
from tasks import artifacts
from tasks.carry_decoding import CarryDecodingConfig, run
from tasks.stage import StageContext

FOUND = {
    "schema_version": 1,
    "name": "running_window@5 (ngram)",
    "decoding": {"method": "running_window", "block_size": 5, "ngram": True},
    "measured": {"hardware": {"cpu": "a CPU"}, "device": "cpu", "dtype": "float32", "speedup": 2.5, "heldout_speedup": 2.25},
}


@pytest.mark.parametrize("links", [True, False])
def test_the_winner_is_carried(tmp_path, base_folder, monkeypatch, links):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    export, search, final = (tmp_path / name for name in ("export", "search", "final"))
    shutil.copytree(base_folder, export)
    (export / "README.md").write_text("# card\n")
    (export / "manifest.json").write_text("{}")
    for folder in (search, final):
        folder.mkdir()
    artifacts.write_json(search / "decoding.json", FOUND)
    if not links:
        monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    before = {p.name: p.read_bytes() for p in export.iterdir() if p.is_file()}
    metrics = run(CarryDecodingConfig(), {"model": export, "search": search}, final, StageContext())
    assert metrics == {"speedup": 2.5, "heldout_speedup": 2.25}
    assert {p.name: p.read_bytes() for p in export.iterdir() if p.is_file()} == before  # the export is as it was
    assert (final / "model.safetensors").samefile(export / "model.safetensors") == links
    assert not (final / "manifest.json").exists()
    assert "running_window@5 (ngram)" in (final / "README.md").read_text() and "2.25" in (final / "README.md").read_text()
    assert artifacts.read_json(final / "jacobi_forcing.json")["decoding"] == FOUND["decoding"]
    configs, real = [], hf.generate
    monkeypatch.setattr(hf, "generate", lambda model, ids, config, **more: configs.append(config) or real(model, ids, config, **more))
    model = AutoModelForCausalLM.from_pretrained(final, trust_remote_code=True)
    model.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=4)
    assert [(c.method.value, c.block_size, c.ngram) for c in configs] == [("running_window", 5, True)]
