"""The figures of a dry run: sizes against real models, bytes and seconds against numbers worked out by hand, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pipelines.estimate.forecast import UNKNOWN, EstimateConfig, forecast, gpus_here, shortfalls, stage_states
from pipelines.estimate.hardware import HARDWARE, hardware_for
from pipelines.estimate.memory import adapter_parameters, decoding_memory, training_memory
from pipelines.estimate.model import ModelShape, shape_of
from pipelines.estimate.table import estimate_table
from pipelines.graph.dag import plan
from pipelines.stages import build_graph
from pipelines.store import Store
from tasks.base_model import stage as base_stage
from tasks.distill.config import DistillConfig, LoraSettings
from tests.pipelines.configs import built

QWEN_7B = ModelShape(layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, vocabulary=152064, tied=False, qkv_bias=True, context=32768)
SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


def figures(config, root: Path, manifests=None):
    planned = plan(build_graph(config, identity_cache=root), Store(root))
    return planned, forecast(config, planned, root=root, manifests=manifests or {})


# ---- sizes


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SMALL, tie_word_embeddings=False),
        Qwen2Config(**SMALL, tie_word_embeddings=True),
        LlamaConfig(**SMALL, tie_word_embeddings=False),
        Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
        GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    ],
    ids=lambda c: f"{c.model_type}-{'tied' if c.tie_word_embeddings else 'untied'}",
)
def test_a_config_json_gives_the_parameters_of_the_model(config, tmp_path: Path):
    config.save_pretrained(tmp_path)
    shape = shape_of(json.loads((tmp_path / "config.json").read_text()))
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    # GPT-2 has position embeddings and biases everywhere: small, and not counted
    tolerance = 0.12 if config.model_type == "gpt2" else 0.005
    assert shape.parameters == pytest.approx(real.num_parameters(), rel=tolerance)


def test_seven_billion_are_what_they_are():
    assert QWEN_7B.layer_parameters == 233_057_792
    assert QWEN_7B.parameters == 7_615_616_512  # the model card's 7.61 B
    assert QWEN_7B.kv_bytes("bfloat16") == 57_344  # 2 x 28 layers x 4 heads of 128 x 2 bytes


def test_a_mixture_of_experts_is_not_guessed():
    assert shape_of({"model_type": "qwen2_moe", "num_experts": 60, **{f"{k}": v for k, v in SMALL.items()}}) is None
    assert shape_of({"model_type": "mamba"}) is None


# ---- memory and seconds, by hand (docs/recipes.md)


def test_training_memory_of_the_paper_recipe():
    config = DistillConfig(batch_size=4, activation_checkpointing=True)
    memory = training_memory(QWEN_7B, config, ranks=4, row=4608, gpu=True)
    assert memory.weights == pytest.approx((7.6156 * 4 / 4) + 2 * (1.08999 + 2 * 0.233058), abs=0.01)
    assert memory.optimizer == pytest.approx(3 * 7.6156, abs=0.01)  # gradients and two moments, a quarter of each, 4 bytes
    kept = 28 * 3584 + 8 * 3584 + 4 * 18944
    assert memory.activations == pytest.approx(4608 * kept * 2e-9 + 2**26 * 16e-9, abs=0.001)
    assert memory.start == pytest.approx(7.6156 * 4 * 1.25, abs=0.01)
    assert memory.total == memory.start > memory.weights + memory.optimizer + memory.activations


def test_without_checkpointing_every_layer_keeps_its_activations():
    kept, recomputed = (
        training_memory(QWEN_7B, DistillConfig(batch_size=4, activation_checkpointing=on), ranks=4, row=4608, gpu=True) for on in (False, True)
    )
    assert kept.activations > 9 * recomputed.activations
    assert kept.total > 60


def test_adapters_need_no_optimizer_for_the_rest():
    config = DistillConfig(lora=LoraSettings(rank=16))
    memory = training_memory(QWEN_7B, config, ranks=4, row=4608, gpu=True)
    assert adapter_parameters(QWEN_7B, 16) == 40_370_176  # as peft counts for Qwen2.5-7B
    assert memory.optimizer == pytest.approx(3 * 0.04037, abs=0.001)


def test_decoding_memory_grows_with_the_texts():
    memory = decoding_memory(QWEN_7B, dtype="bfloat16", texts=64, longest=2560)
    assert memory.weights == pytest.approx(15.231, abs=0.001)
    assert memory.kv == pytest.approx(64 * 2560 * 57_344e-9, abs=0.001)


def test_a_single_token_on_an_a100_takes_what_the_paper_measured():
    """41.3 tokens per second on an A100, 83.0 on a B200 (Tables 1 and 3)."""
    for name, tps in (("A100", 41.3), ("B200", 83.0)):
        assert 1 / HARDWARE[name].forward_seconds(QWEN_7B, tokens=1) == pytest.approx(tps, rel=0.02)


def test_hardware_is_seen_asked_for_or_replaced():
    assert hardware_for(None, seen=["NVIDIA H200"], gpus=True).name == "H200"
    assert hardware_for(None, seen=[], gpus=True).name == "H100"
    assert hardware_for(None, seen=["NVIDIA H200"], gpus=False).name == "cpu"
    assert hardware_for("A100", seen=["NVIDIA H200"], gpus=True, tflops=100, memory_gb=None).tflops == 100
    with pytest.raises(ValueError, match="hardware must be one of"):
        EstimateConfig(hardware="C64")


# ---- a whole run


@pytest.fixture
def paper(tmp_path: Path):
    config = built("experiment=paper_coder_7b", "estimate.here=false")
    return config, *figures(config, tmp_path)


def test_the_paper_recipe_by_hand(paper):
    _, _, found = paper
    trajectories, pack, distill = (found.stages[f"round1/{kind}"] for kind in ("trajectories", "pack", "distill"))
    assert (trajectories.rows, trajectories.tokens, trajectories.gpus) == (450_000, 180_000_000, 8)
    assert pack.tokens == 450_000 * (200 + 2 * 400)
    assert pack.rows == pytest.approx(450_000 / (0.95 * 4608 / 1000), rel=1e-6)
    assert (distill.rows, distill.gpus) == (40_000, 4)  # 10k steps of 4
    assert distill.tokens == pytest.approx(40_000 * 0.95 * 4608, rel=1e-6)
    gpu_seconds = 8 * QWEN_7B.multiplied * distill.tokens / (989e12 * 0.3)
    assert distill.seconds * distill.gpus == pytest.approx(gpu_seconds, rel=1e-6)
    assert gpu_seconds / 3600 == pytest.approx(9.3, abs=0.1)
    # one answer of 400 tokens: its share of greedy forwards of 64, then 2 x 200 + 400 x (1 + 8) tokens in wide ones
    each = 400 / 64 * 28 * 0.6e-3 + 2 * QWEN_7B.multiplied * 4000 / (989e12 * 0.35)
    assert trajectories.seconds == pytest.approx(450_000 / 8 * each, rel=1e-6)
    assert found.stages["cllm/distill"].rows == 80_000  # as many tokens as both rounds
    assert found.scratch_gb == 2 * distill.scratch_gb  # which trains beside the second
    assert replace(found, cluster=replace(found.cluster, parallel_stages=1)).scratch_gb == distill.scratch_gb
    assert found.stages["round2/trajectories"].seconds < trajectories.seconds  # 16 states per token, a third of the forwards


def test_a_hub_id_that_nobody_can_identify_is_unknown_not_cached(paper):
    _, planned, found = paper
    assert set(found.states.values()) == {UNKNOWN}
    table = estimate_table(planned, found)
    assert table.splitlines()[1].split()[:3] == ["prompts", "unknown", "(offline)"]
    assert "7.62 billion parameters" in table and "declared: estimate.model" in table and "H100, declared" in table
    assert all(p.fingerprint not in table for p in planned)


def test_without_sizes_it_says_what_is_missing(tmp_path: Path):
    planned, found = figures(built("experiment=paper_coder_7b", "estimate.model.layers=0"), tmp_path)
    assert found.stages["round1/distill"].memory is None and found.stages["round1/distill"].seconds is None
    table = estimate_table(planned, found)
    assert "the sizes of Qwen/Qwen2.5-Coder-7B-Instruct are unknown here; declare them (estimate.model)" in table
    assert "stages of unknown length" in table


def test_more_gpus_memory_or_disk_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipelines.estimate.forecast.gpus_here", lambda: 4)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10e9))
    _, found = figures(built("experiment=paper_coder_7b", "estimate.memory_gb=24"), tmp_path)
    told = list(shortfalls(found, root=tmp_path))
    assert told[0].startswith("cluster.workers=8 needs 8 GPUs, this machine has 4")
    assert any(t.startswith("round1/distill needs about 38 GB of a H100's 24") for t in told)
    assert told[-1].startswith(f"paths.store={tmp_path}: the run needs about") and "10 are free" in told[-1]
    monkeypatch.setattr("pipelines.estimate.forecast.gpus_here", lambda: 8)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1e13))
    _, found = figures(built("experiment=paper_coder_7b"), tmp_path)
    assert list(shortfalls(found, root=tmp_path)) == []


def test_an_existing_cluster_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr("tasks.cluster.start_ray", lambda cluster: asked.append(cluster.address))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1e13))
    _, found = figures(built("experiment=paper_coder_7b", "cluster=nodes", "cluster.workers=32"), tmp_path)
    assert found.stages["round1/trajectories"].gpus == 32 and found.stages["round1/distill"].gpus == 4
    assert list(shortfalls(found, root=tmp_path)) == [] and asked == ["auto"]

    def nobody(cluster):
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify")

    monkeypatch.setattr("tasks.cluster.start_ray", nobody)
    assert next(shortfalls(found, root=tmp_path)).startswith("cluster.address=auto: no cluster answers (Could not find any running Ray instance.)")


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch):
    machine = {"gpus": ["NVIDIA H200"] * 4, "visible_gpus": "0,2"}
    monkeypatch.setattr("pipelines.estimate.forecast.machine_identity", lambda: machine)
    assert gpus_here() == 2
    machine["visible_gpus"] = "-1"
    assert gpus_here() == 0
    machine["visible_gpus"] = None
    assert gpus_here() == 4


def test_what_ran_before_is_measured(tmp_path: Path):
    """Rates of earlier stages on a model of the same sizes, and the latency curve of this machine."""
    config = built("experiment=smoke")
    before = figures(config, tmp_path)[1]
    assert not before.stages["round1/distill"].measured
    tiny = dict(
        model_type="qwen2",
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=1024,
        tie_word_embeddings=True,
    )
    base = {"kind": "base", "fingerprint": "a" * 16, "started": "2026-01-01", "metrics": {}, "upstream": {}, "config": {}, "seconds": 1}
    distill = {**base, "kind": "distill", "fingerprint": "b" * 16, "metrics": {"train_tokens": 1000}, "upstream": {"model": "a" * 16}, "seconds": 20}
    for record in (base, distill):
        folder = tmp_path / f"{record['kind']}-{record['fingerprint']}"
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps(record))
    (tmp_path / f"base-{'a' * 16}" / "config.json").write_text(json.dumps(tiny))
    after = figures(config, tmp_path)[1].stages["round1/distill"]
    assert after.measured and after.seconds == pytest.approx(after.tokens * 0.02)
    with_gpus = built("experiment=smoke", "cluster.gpus_per_worker=1", "estimate.here=false", "estimate.hardware=H100")
    assert not figures(with_gpus, tmp_path)[1].stages["round1/distill"].measured  # by CPUs
    (tmp_path / f"distill-{'b' * 16}" / "manifest.json").write_text(json.dumps({**distill, "gpus": True}))
    assert figures(with_gpus, tmp_path)[1].stages["round1/distill"].measured
    assert not figures(config, tmp_path)[1].stages["round1/distill"].measured
    (tmp_path / f"distill-{'b' * 16}" / "manifest.json").write_text(json.dumps(distill))
    (tmp_path / f"base-{'a' * 16}" / "config.json").write_text(json.dumps({**tiny, "hidden_size": 64}))
    assert not figures(config, tmp_path)[1].stages["round1/distill"].measured  # of another model


def test_finished_stages_speak_for_themselves(tmp_path: Path):
    config = built("experiment=smoke")
    planned = plan(build_graph(config, identity_cache=tmp_path), Store(tmp_path))
    done = [SimpleNamespace(**{**vars(p), "cached": p.stage.id in ("prompts", "base", "round1/trajectories")}) for p in planned]
    manifests = {
        "prompts": SimpleNamespace(metrics={"train": 64, "prompt_tokens_mean": 30.0}),
        "base": SimpleNamespace(metrics={}),
        "round1/trajectories": SimpleNamespace(metrics={"trajectories": 60, "answer_tokens": 1200}),
    }
    found = forecast(config, done, root=tmp_path, manifests=manifests)
    assert found.stages["round1/trajectories"].tokens == 1200 and found.stages["round1/trajectories"].seconds == 0
    assert found.stages["round1/pack"].tokens == pytest.approx(60 * (30 + 2 * 20))
    assert "prompts of 30 tokens (measured), answers of 20 (measured)" in "\n".join(found.basis)


def test_states_follow_inputs():
    def planned(stage_id, cached, inputs=(), external=None):
        stage = SimpleNamespace(id=stage_id, inputs={str(i): source for i, source in enumerate(inputs)}, external=external or {})
        return SimpleNamespace(stage=stage, cached=cached)

    hub = {"model": {"hub": "a/b", "commit": None}}
    known = {"model": {"hub": "a/b", "commit": "c0ffee"}}
    stages = [planned("a", True, external=known), planned("b", True, ["a"], hub), planned("c", True, ["b"]), planned("d", False, ["a"])]
    assert stage_states(stages) == {"a": "cached", "b": UNKNOWN, "c": UNKNOWN, "d": "to run"}


def test_the_kinds_that_are_estimated_are_those_of_the_graph(tmp_path: Path):
    """A stage whose kind was renamed would silently cost nothing."""
    planned, found = figures(built("experiment=smoke", "tune=true"), tmp_path)
    heavy = {p.stage.kind for p in planned} - {"evaluate", "excerpts", "final", "report"}
    light = {p.stage.kind for p in planned if found.stages[p.stage.id].seconds == 10.0}
    assert not heavy & light
    assert base_stage.BaseModelConfig  # imported: its config is what `_base` reads
