"""What the small tools share: a checkpoint folder as model and tokenizer, and prompts as token ids. Errors are one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.base_model.model_source import resolve_source
from tasks.prepare_prompts import template
from tasks.stage import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_tokenizer(path: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Raises UserError where there is none at `path` (a checkpoint folder or hub id)."""
    from tasks.base_model import import_model

    location = _location(path)
    try:
        return import_model.load_tokenizer(location, trust_remote_code=trust_remote_code)
    except UserError as error:
        raise _renamed(error) from error


def load_model(path: str, *, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """In eval mode, on the GPU where there is one. Raises UserError where `path` holds no causal language model."""
    from jacobi_core import hub

    location = _location(path)
    try:
        return hub.load_model(location, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # every library below raises its own kinds
        raise UserError(f"model={path}: cannot be loaded ({' '.join(str(error).split())[:300]})") from error


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Messages through the chat template. Raises UserError where there is none."""
    if not tokenizer.chat_template:
        raise UserError("chat: the tokenizer has no chat template; add one to the checkpoint, or pass chat=false to feed the text as it is")
    return template(tokenizer, messages)


def encode_raw(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """A text as it is, with what the tokenizer itself puts around one. Raises UserError where it has no token."""
    ids = list(tokenizer(text)["input_ids"])
    if not ids:
        raise UserError("prompt: it has no token; give some text")
    return ids


def _location(path: str) -> str:
    try:
        source = resolve_source(path)
    except UserError as error:
        raise _renamed(error) from error
    if source.gguf_file:
        raise UserError(f"model={path}: is a GGUF file; give a checkpoint folder (the pipeline's base stage makes one: until=base model.path={path})")
    return source.location


def _renamed(error: UserError) -> UserError:
    """The pipeline's name of the setting, as the tools call it."""
    return UserError(str(error).replace("model.path", "model").replace("model.trust_remote_code", "trust_remote_code"))
