"""Whether prompts and answers fit a model, before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jacobi_core.decoding.context import context_of
from tasks.artifacts import Prompt
from tasks.stage import UserError


def check_room(setting: str, max_new_tokens: int, model: Path, prompts: Sequence[Prompt], *, trust_remote_code: bool = False) -> None:
    """Raises UserError naming the setting where the longest prompt and an answer exceed the context length of the checkpoint."""
    from transformers import AutoConfig

    limit = context_of(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code))
    longest = max(len(p.input_ids) for p in prompts)
    if limit is not None and longest + max_new_tokens > limit:
        raise UserError(
            f"{setting}={max_new_tokens}: the longest prompt has {longest} tokens and the model holds {limit}; set it to {limit - longest} or less, "
            "or lower data.max_prompt_tokens"
        )
