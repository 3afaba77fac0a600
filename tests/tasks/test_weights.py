"""Weights on their way out of a sharded training: whole, once each, reloaded by plain transformers, LoRA too; one rank's failure is all ranks'."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from jacobi_core.distillation.losses import PackedLoss
from jacobi_core.distillation.noise_schedule import NoiseSchedule
from jacobi_core.distillation.packing import batch_rows, pack_trajectory
from jacobi_core.hub import load_model
from jacobi_core.trajectories.collect import collect
from tasks.distill.adapters import has_adapters, merged, with_adapters
from tasks.distill.config import DistillConfig, LoraSettings
from tasks.distill.ranks import on_rank_zero
from tasks.distill.weights import gathered, load_into, write_weights
from tasks.stage import UserError
from tests.core.tiny import FAMILIES, random_prompts, tiny_model, tiny_rules
from tests.tasks.tiny_training import exit_codes

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
LORA = DistillConfig(lora=LoraSettings(rank=3, alpha=6.0))
FULL = DistillConfig()


def packed_batch():
    model = tiny_model(seed=1)
    found = collect(model, random_prompts(3, seed=4), [0, 1, 2], block_size=4, max_new_tokens=12, seed=0, rules=tiny_rules(model))
    return batch_rows([pack_trajectory(t, NoiseSchedule(window=2))[0] for t in found.trajectories], multiple_of=8)


def trained(loss: nn.Module, batch) -> nn.Module:
    """Two steps of plain gradient descent."""
    optimizer = torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        loss(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


VARIANTS = {"tied": (True, FULL), "untied": (False, FULL), "lora": (True, LORA)}


def lossy(tied: bool, config: DistillConfig) -> PackedLoss:
    model = tiny_model(seed=1, tied=tied)
    return PackedLoss(with_adapters(model, config.lora, seed=5) if config.lora.rank else model, window=2)


def train_and_write(rank: int, workers: int, folder: Path, batch) -> None:
    from tasks.distill.sharding import shard

    # every rank gets what rank 0 found, also an error
    assert on_rank_zero(lambda: {"asked": 1} if rank == 0 else 1 / 0, rank=rank, workers=2) == {"asked": 1}
    with pytest.raises(UserError, match="^distill.probe: no$"):
        on_rank_zero(lambda: wrong("distill.probe: no"), rank=rank, workers=2)
    for name, (tied, config) in VARIANTS.items():
        loss = trained(shard(lossy(tied, config), workers=2), batch)
        with torch.no_grad():
            loss(batch)  # leaves the root's parameters whole: they must come out the same
        state = gathered(loss, rank=rank)
        assert (state is None) is (rank == 1)
        more = {"source_model_folder": folder / f"base-{tied}", "config": config, "trust_remote_code": False}
        on_rank_zero(lambda name=name, state=state, more=more: write_weights(folder / name, state, **more), rank=rank, workers=2)


def wrong(text: str) -> None:
    raise UserError(text)


def tensor_names(file: Path) -> set[str]:
    with safe_open(file, "pt") as opened:
        return set(opened.keys())


def test_two_fsdp2_ranks_write_what_one_process_trains_and_plain_transformers_reloads(tmp_path):
    batch = packed_batch()
    for tied in (True, False):
        tiny_model(seed=1, tied=tied).save_pretrained(tmp_path / f"base-{tied}")
    assert exit_codes(train_and_write, tmp_path, batch, workers=2) == [0, 0]
    for name, (tied, config) in VARIANTS.items():
        alone = trained(lossy(tied, config), batch).model.eval()
        if name == "lora":
            reloaded = merged(load_model(tmp_path / "base-True", dtype="float64"), tmp_path / name)
            assert not has_adapters(n for n, _ in reloaded.named_parameters())
            names = tensor_names(tmp_path / name / "adapter_model.safetensors")
            assert len(names) == 2 * 7 * 2 and all("lora_" in n for n in names)  # two matrices on seven linear layers of two blocks, nothing else
        else:
            reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            assert reloaded.dtype is torch.float64 and reloaded.config.tie_word_embeddings is tied
            assert tensor_names(tmp_path / name / "model.safetensors") == {n for n, _ in alone.named_parameters()}  # no tensor twice
        torch.testing.assert_close(reloaded(input_ids=IDS).logits, alone(input_ids=IDS).logits)
        base = load_model(tmp_path / f"base-{tied}", dtype="float64")
        assert (reloaded(input_ids=IDS).logits - base(input_ids=IDS).logits).abs().max() > 1e-3  # it was trained
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base-False", "base-True", "lora", "tied", "untied"]  # no temporary folder


def failing_writer(rank: int, workers: int, folder: Path) -> None:
    model = tiny_model(seed=1)
    state = gathered(PackedLoss(model, window=2), rank=rank)
    if rank == 0:  # a disk that is full in the middle of it
        from safetensors import torch as safetensors_torch
        from transformers import modeling_utils

        def full(tensors, filename, **_):
            Path(filename).write_bytes(b"half")
            raise OSError("No space left on device")

        modeling_utils.safe_save_file = safetensors_torch.save_file = full
    more = {"source_model_folder": folder / "base", "config": FULL, "trust_remote_code": False}
    try:
        on_rank_zero(lambda: write_weights(folder / "weights", state, **more), rank=rank, workers=2)
    except RuntimeError as error:
        (folder / f"error-{rank}").write_text(str(error))
        raise


def test_a_failing_rank_zero_ends_every_rank_with_its_error_and_leaves_no_half_folder(tmp_path):
    tiny_model(seed=1).save_pretrained(tmp_path / "base")
    assert exit_codes(failing_writer, tmp_path, workers=2) == [1, 1]
    assert {(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)} == {"rank 0 failed: OSError: No space left on device"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "error-0", "error-1"]


def test_gathered_weights_are_a_copy_and_a_new_folder_replaces_the_old(tmp_path):
    model = tiny_model(seed=1)
    model.save_pretrained(tmp_path / "base")
    loss = PackedLoss(model, window=2)
    state = gathered(loss, rank=0)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(state[name], before[name]) for name in before)
    more = {"source_model_folder": tmp_path / "base", "config": FULL, "trust_remote_code": False}
    (tmp_path / ".weights.tmp").mkdir()
    (tmp_path / ".weights.tmp" / "junk").touch()  # of a killed attempt
    for tensors in (state, gathered(loss, rank=0)):
        write_weights(tmp_path / "weights", tensors, **more)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "weights"]
    assert torch.equal(load_model(tmp_path / "weights", dtype="float64")(IDS).logits, model(IDS).logits)
    other = tiny_model(seed=9)
    load_into(other, state)
    assert torch.equal(other(IDS).logits, load_model(tmp_path / "base", dtype="float64")(IDS).logits)
    with pytest.raises(AssertionError, match=r"missing.*model\.norm\.weight"):
        load_into(other, {name: tensor for name, tensor in state.items() if name != "model.norm.weight"})


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_change_nothing_at_first_and_only_they_learn(family):
    batch, models = packed_batch(), [tiny_model(family, seed=1) for _ in range(3)]
    generator = torch.get_rng_state()
    plain, models = models[2], [with_adapters(model, LORA.lora, seed=5) for model in models[:2]]
    assert torch.equal(torch.get_rng_state(), generator)
    assert type(models[0]) is type(plain)
    assert torch.equal(models[0](IDS).logits, plain(IDS).logits)
    loss = PackedLoss(models[0], window=2)
    torch.testing.assert_close(loss(batch).loss, PackedLoss(plain, window=2)(batch).loss)
    loss(batch).loss.backward()
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, theirs), name  # one seed, one draw
        assert (mine.grad is not None) is mine.requires_grad is (".lora_" in name), name


def test_adapters_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(UserError, match=r"distill\.lora\.target_modules.*'query'.*q_proj, k_proj.*all-linear"):
        with_adapters(tiny_model(), LoraSettings(rank=2, target_modules=["q_proj", "query"]), seed=0)
    only = with_adapters(tiny_model(), LoraSettings(rank=2, target_modules=["q_proj"]), seed=0)
    assert sum(p.requires_grad for p in only.parameters()) == 4
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install jacobi-forcing\[lora\]"):
        with_adapters(tiny_model(), LORA.lora, seed=0)


def test_large_weights_are_written_in_shards(tmp_path, monkeypatch):
    from transformers import PreTrainedModel

    real = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda self, *a, **k: real(self, *a, max_shard_size="20KB", **k))
    model = tiny_model("llama", tied=False, seed=1)
    model.save_pretrained(tmp_path / "base")
    state = gathered(PackedLoss(model, window=2), rank=0)
    write_weights(tmp_path / "weights", state, source_model_folder=tmp_path / "base", config=FULL, trust_remote_code=False)
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state) and len(set(index["weight_map"].values())) > 1
    read = load_model(tmp_path / "weights", dtype="float64").state_dict()
    # not their products: where a tensor lies in memory may change the last bit of those
    assert read.keys() == model.state_dict().keys() and all(torch.equal(read[name], weight) for name, weight in model.state_dict().items())
