"""Source -> drafts -> order and splits -> tokens -> file. Streams: memory does not grow with the number of prompts read."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import artifacts
from tasks.artifacts import Prompt, prompt_id
from tasks.prepare_prompts.arrange import ArrangedDrafts, GivenDrafts
from tasks.prepare_prompts.config import GENERATED, PUBLISHED, SPLITS, Draft, PreparePromptsConfig, Source, TooLong
from tasks.prepare_prompts.generated import generated_drafts, published_drafts
from tasks.prepare_prompts.open_code_instruct import open_code_instruct_drafts
from tasks.prepare_prompts.open_thoughts import open_thoughts_drafts
from tasks.prepare_prompts.plain import plain_drafts
from tasks.prepare_prompts.template import template, template_hash, truncate
from tasks.row_files import HubPart, open_rows
from tasks.stage import StageContext, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def run(config: PreparePromptsConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: `prompts`, of which the tokenizer is taken, for a benchmark beside them; else none. Writes prompts.parquet and tokenizer/; returns
    prompts per split and, by reason, what was dropped."""
    with tempfile.TemporaryDirectory(prefix=".unsorted-", dir=output) as scratch:
        dropped: Counter[str] = Counter()
        read = _read(config, dropped)
        drafts = GivenDrafts(read) if config.source in GENERATED else ArrangedDrafts(read, config, Path(scratch))
        if not drafts.total and not dropped:
            raise UserError(f"{config.section}.path={config.path}: holds no prompts")
        dropped["duplicate"] = drafts.duplicates
        tokenizer = _tokenizer(config, inputs, drafts, trust_remote_code=context.trust_remote_code)
        tokenizer.save_pretrained(output / "tokenizer")
        maker = _PromptMaker(config, tokenizer, dropped)
        artifacts.write_prompts(output, maker.prompts(drafts), template_sha256=template_hash(tokenizer))
    counts = maker.counts
    said = ", ".join(f"{reason} {count}" for reason, count in dropped.items() if count) or "none"
    log.info("prompts: %s; truncated %d; dropped by rule: %s", dict(counts), maker.truncated, said)
    if not counts["train"] and not config.only_test:
        raise UserError(
            f"data: the training split is empty (source={config.source.value}, {drafts.total} prompts kept by its rules, dropped: {said})"
        )
    if config.test and not counts["test"]:
        wanted = "" if config.only_test else f".test={config.test}"
        raise UserError(f"{config.section}{wanted}: no prompt is left for the test split (dropped: {said})")
    return {
        **{split: counts[split] for split in SPLITS},
        **{f"dropped_{reason}": dropped[reason] for reason in sorted({"duplicate", "too_long", *dropped})},
        "truncated": maker.truncated,
        "prompt_tokens_mean": maker.tokens / sum(counts.values()),
        "prompt_tokens_max": maker.longest,
    }


def _read(config: PreparePromptsConfig, dropped: Counter[str]) -> Iterator[Draft]:
    if config.source in GENERATED:
        return generated_drafts(config)
    if config.source in PUBLISHED:
        return published_drafts(config)
    part = HubPart(config.subset, config.source_split, config.revision)
    files = partial(open_rows, config.path, setting="data.path", part=part)
    if config.source is Source.open_code_instruct:
        return open_code_instruct_drafts(config.open_code_instruct, files(), dropped)
    if config.source is Source.open_thoughts:
        return open_thoughts_drafts(config.open_thoughts_sources, files(), dropped)
    return plain_drafts(config, files())


class _PromptMaker:
    """Drafts with tokens, and counts of what became of them."""

    def __init__(self, config: PreparePromptsConfig, tokenizer: PreTrainedTokenizerBase, dropped: Counter[str]) -> None:
        self._config, self._tokenizer, self._dropped = config, tokenizer, dropped
        self.counts: Counter[str] = Counter()
        self.truncated = self.tokens = self.longest = 0

    def prompts(self, drafts: Iterable[Draft]) -> Iterator[Prompt]:
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        written: set[int] = set()  # a truncated prompt may equal another one
        for draft in drafts:
            try:
                messages, ids = self._fitting(system + draft.messages)
            except UserError:
                raise
            except Exception as error:  # a template may refuse roles and their order; Jinja and tokenizers raise their own kinds
                if not self._dropped["template"]:
                    log.warning("prompts: the chat template refuses one that begins %r: %s", draft.messages[0]["content"][:60], error)
                self._dropped["template"] += 1
                continue
            identity = prompt_id(messages) if messages else None
            if identity is None or identity in written:
                self._dropped["too_long" if identity is None else "duplicate"] += 1
                continue
            written.add(identity)
            self.counts[draft.split] += 1
            self.tokens, self.longest = self.tokens + len(ids), max(self.longest, len(ids))
            yield Prompt(identity, draft.split, messages, ids, draft.meta)

    def _fitting(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]] | None, list[int]]:
        limit = self._config.max_prompt_tokens
        ids = template(self._tokenizer, messages)
        if len(ids) <= limit:
            return messages, ids
        shorter = truncate(self._tokenizer, messages, limit) if self._config.too_long is TooLong.truncate else None
        if shorter is None:
            return None, []
        self.truncated += 1
        return shorter, template(self._tokenizer, shorter)


def _tokenizer(
    config: PreparePromptsConfig, inputs: Mapping[str, Path], drafts: Iterable[Draft], *, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    if "prompts" in inputs:
        from jacobi_core.hub import load_tokenizer

        return load_tokenizer(inputs["prompts"] / "tokenizer", trust_remote_code=trust_remote_code)
    if config.tokenizer:
        from tasks.base_model.import_model import load_tokenizer

        return load_tokenizer(config.tokenizer, trust_remote_code=trust_remote_code)
    from tasks.base_model.tokenizer import train_tokenizer

    train = [d for d in drafts if d.split == "train"]
    texts = [m["content"] for d in train for m in d.messages] + [d.meta["solution"] for d in train if d.meta.get("solution")]
    return train_tokenizer(texts, vocab_size=config.tokenizer_vocabulary)
