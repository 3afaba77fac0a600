"""Stage `roundN/export`: the distilled weights as a plain Hugging Face checkpoint anybody can load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks import artifacts
from tasks.stage import StageContext

PROVENANCE = "jacobi_forcing.json"  # beside config.json: where the weights come from, tokens trained so far


@dataclass
class ExportConfig:
    name: str = "round1"  # as in results.json
    block_size: int = 16  # n of the trajectories it was trained on
    dtype: str = "float32"


def run(config: ExportConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: model (what the distillation started from: architecture, tokenizer, generation config), checkpoint."""
    from transformers import GenerationConfig

    from jacobi_core.hub import empty_model, load_tokenizer, save_checkpoint
    from tasks.distill.checkpoint import load_weights

    source, trust = inputs["model"], context.trust_remote_code
    model = empty_model(source, dtype=config.dtype, trust_remote_code=trust)
    load_weights(inputs["checkpoint"] / "checkpoint", model)
    save_checkpoint(
        model,
        load_tokenizer(source, trust_remote_code=trust),
        output,
        generation_config=GenerationConfig.from_pretrained(source),
        with_decoder=True,
        block_size=config.block_size,
    )
    before = provenance(source)
    tokens = before["train_tokens"] + artifacts.read_json(inputs["checkpoint"] / "training.json")["train_tokens"]
    artifacts.write_json(output / PROVENANCE, {**before, "name": config.name, "train_tokens": tokens, "block_size": config.block_size})
    artifacts.write_text(output / "README.md", _model_card(config, before, tokens))
    return {"train_tokens": tokens, "parameters": model.num_parameters()}


def provenance(model: Path) -> dict:
    """What is known of a model folder of ours: {"name", "source", "licence", "train_tokens"}; train_tokens 0 for a base."""
    return artifacts.read_json(model / PROVENANCE)


def _model_card(config: ExportConfig, before: dict, tokens: int) -> str:
    return f"""---
library_name: transformers
license: {before["licence"]}
base_model: {before["source"]}
tags: [jacobi-forcing, parallel-decoding]
---
# {before["source"]}, Jacobi Forcing {config.name}

An ordinary autoregressive checkpoint of {before["source"]} (licence: {before["licence"]}), trained with Jacobi Forcing
(arXiv 2512.14681) on {tokens:,} packed tokens of its own greedy answers, last at block size {config.block_size}.
Greedy parallel decoding returns exactly what greedy autoregressive decoding of these weights returns, in fewer forwards.

After `pip install jacobi-forcing`, for one prompt at a time:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this checkpoint is
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)  # trust: custom_generate/generate.py
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "..."}}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(**inputs, do_sample=False, max_new_tokens=256)  # parallel, block_size={config.block_size}
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

Without trust_remote_code the same call decodes one token at a time, with the same result; `type(model).generate(model, ...)` does so with it.
`python -m pipelines.doctor model=FOLDER` proves the equality on your machine.
"""
