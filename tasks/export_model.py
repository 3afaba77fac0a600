"""Stage `roundN/export`: the distilled weights as a plain Hugging Face checkpoint anybody can load, with its decoder and its card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import artifacts
from tasks.stage import StageContext

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROVENANCE = "jacobi_forcing.json"  # beside config.json: where the weights come from, tokens trained so far


@dataclass
class ExportConfig:
    name: str = "round1"  # as in results.json
    block_size: int = 16  # n of the trajectories it was trained on


def run(config: ExportConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: model (what training started from: tokenizer, generation config, base of adapters), distill (the trained weights), packed and
    prompts (what they learned from, for the card). The weights are stored in the dtype of the checkpoint that training started from.

    Raises UserError or ValueError where the weights are incomplete.
    """
    from transformers import AutoConfig, GenerationConfig

    from jacobi_core.hub import load_tokenizer, save_checkpoint
    from tasks.model_card import model_card, public_name

    source, trust = inputs["model"], context.trust_remote_code
    stored = AutoConfig.from_pretrained(source, trust_remote_code=trust).dtype
    dtype = str(stored or "float32").removeprefix("torch.")
    model = _trained_model(inputs["distill"] / "weights", source, dtype=dtype, trust_remote_code=trust)
    save_checkpoint(
        model,
        load_tokenizer(source, trust_remote_code=trust),
        output,
        generation_config=GenerationConfig.from_pretrained(source),
        with_decoder=True,
        block_size=config.block_size,
    )
    before, training = provenance(source), artifacts.read_json(inputs["distill"] / "training.json")
    tokens = before["train_tokens"] + training["train_tokens"]
    step = {"name": config.name, "block_size": config.block_size, "train_tokens": training["train_tokens"]}
    now = {**before, "name": config.name, "train_tokens": tokens, "block_size": config.block_size, "dtype": dtype}
    now["source"] = public_name(before["source"])
    now["rounds"] = [*before.get("rounds", []), step]
    now["data"] = artifacts.PromptRows(inputs["prompts"], "train").read([0])[0].meta.get("problem_set")  # one source per prompts stage
    artifacts.write_json(output / PROVENANCE, now)
    artifacts.write_text(output / "README.md", model_card(now, training, schedule=_schedule(inputs["packed"])))
    return {"train_tokens": tokens, "parameters": model.num_parameters()}


def provenance(model: Path) -> dict[str, Any]:
    """What is known of a model folder of ours: {"name", "source", "licence", "train_tokens"} and, of an export, "block_size", "dtype",
    "rounds", "data"; train_tokens is 0 for a base."""
    return artifacts.read_json(model / PROVENANCE)


def _trained_model(weights: Path, source: Path, *, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """Whole, on the CPU, in `dtype`. Adapters are added in float32 or more: rounded once, like trained weights."""
    import torch

    from jacobi_core.hub import load_model
    from tasks.distill.adapters import is_adapter_folder, merged

    cpu, target = torch.device("cpu"), getattr(torch, dtype)
    if not is_adapter_folder(weights):
        return load_model(weights, dtype=dtype, device=cpu, trust_remote_code=trust_remote_code)
    exact = "float64" if dtype == "float64" else "float32"
    return merged(load_model(source, dtype=exact, device=cpu, trust_remote_code=trust_remote_code), weights).to(target)


def _schedule(packed: Path) -> dict[str, Any]:
    from tasks.packed_files import PACKED

    metadata = artifacts.read_schema(packed / "packed.parquet", PACKED).metadata
    return json.loads(metadata[b"schedule"])
