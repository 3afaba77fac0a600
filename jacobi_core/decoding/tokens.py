"""Which token ids end a text, and which may appear in a random draft. Knows nothing about decoding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


def eos_id_set(*sources: Any) -> frozenset[int]:
    """Union of end-of-text ids given as None, an int, an iterable of ints or a tensor. May be empty."""
    ids: set[int] = set()
    for source in sources:
        if source is None:
            continue
        if isinstance(source, torch.Tensor):
            source = source.flatten().tolist()
        ids.update([int(source)] if isinstance(source, int) else (int(i) for i in source))
    return frozenset(ids)


@dataclass(frozen=True)
class TokenRules:
    """The ids that end a text and those that may be drafted at random.

    `vocabulary_size` counts real tokens: embedding rows beyond it are padding, never trained, never drafted.
    """

    eos_ids: frozenset[int]
    vocabulary_size: int
    special_ids: frozenset[int]

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, *, eos_ids: int | Iterable[int] | torch.Tensor | None = None) -> TokenRules:
        """Rules of a checkpoint: EOS from tokenizer, generation config, model config and caller together.

        Without a tokenizer the real vocabulary cannot be told from a padded one, and all embedding rows count as real.
        Raises ValueError where nothing would be left to draft from.
        """
        text_config = model.config.get_text_config()
        rows = model.get_input_embeddings().weight.shape[0]
        eos = eos_id_set(
            eos_ids,
            getattr(model.generation_config, "eos_token_id", None),
            getattr(text_config, "eos_token_id", None),
            tokenizer.eos_token_id if tokenizer is not None else None,
        )
        special = eos | eos_id_set(getattr(text_config, "bos_token_id", None), getattr(text_config, "pad_token_id", None))
        size = rows
        if tokenizer is not None:
            size = min(rows, len(tokenizer))
            special |= frozenset(tokenizer.all_special_ids)
            special |= frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        if not any(i not in special for i in range(size)):
            raise ValueError(f"no token is left to draft from: all {size} ids of the vocabulary are special")
        return cls(eos_ids=eos, vocabulary_size=size, special_ids=special)

    @cached_property
    def draftable(self) -> torch.Tensor:
        """bool [vocabulary_size]: True where an id may be drafted at random."""
        mask = torch.ones(self.vocabulary_size, dtype=torch.bool)
        mask[[i for i in self.special_ids if i < self.vocabulary_size]] = False
        return mask

    @cached_property
    def eos_tensor(self) -> torch.Tensor:
        """long [number of EOS ids], sorted."""
        return torch.tensor(sorted(self.eos_ids), dtype=torch.long)

    def may_draft(self, ids: torch.Tensor) -> torch.Tensor:
        """bool, shape of `ids` (on the CPU): True where an id may be drafted at random."""
        return (ids < self.vocabulary_size) & self.draftable[ids.clamp(max=self.vocabulary_size - 1)]
