"""How long a text a model may read, by its config alone: no weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELDS = ("max_position_embeddings", "rope_parameters", "rope_scaling")  # the last is what older checkpoints call the second


def stated_context(config: Mapping[str, Any]) -> int | None:
    """Most tokens of a text, by the text part of a config.json; None where it does not say.

    Scaled rotary positions reach `factor` times their original length, which some checkpoints (YaRN's) have not put into
    max_position_embeddings. Without an original length only YaRN has one, as in transformers: max_position_embeddings.
    """
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or limit <= 0:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return limit
    kind, factor, original = rope.get("rope_type", rope.get("type")), rope.get("factor"), rope.get("original_max_position_embeddings")
    if original is None and kind == "yarn":
        original = limit
    if not isinstance(factor, int | float) or not isinstance(original, int | float):
        return limit
    return max(limit, int(factor * original))


def context_of(config: Any) -> int | None:
    """The same of a config that transformers has loaded."""
    text = config.get_text_config()
    return stated_context({name: getattr(text, name, None) for name in FIELDS})
