"""From a request's body to a prompt, a decoding config and stop strings; every reason to refuse one, in OpenAI's words."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jacobi_core.decoding.config import DecodingConfig, Method
from tasks.prepare_prompts.template import template
from tasks.serving.protocol import ApiError, Asked, ChatRequest, CompletionRequest
from tasks.serving.settings import KNOBS, PLAIN, ServingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Order:
    """What to decode."""

    prompt: list[int]
    config: DecodingConfig
    stops: tuple[str, ...]


def order(asked: CompletionRequest | ChatRequest, tokenizer: PreTrainedTokenizerBase, settings: ServingSettings, context: int | None) -> Order:
    """context: most tokens of a text, None where the model knows no limit. Raises ApiError for what cannot be done."""
    if asked.model != settings.name:
        raise ApiError(404, f"The model `{asked.model}` does not exist; this server has `{settings.name}`.", param="model", code="model_not_found")
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options: only allowed with stream=true.", param="stream_options")
    prompt = _chat(asked, tokenizer) if isinstance(asked, ChatRequest) else _prompt(asked, tokenizer)
    if not prompt:
        raise ApiError(400, "The prompt has no token; give some text.", param="prompt")
    if len(prompt) > settings.max_prompt_tokens:
        raise ApiError(
            400, f"The prompt has {len(prompt)} tokens, more than the {settings.max_prompt_tokens} allowed here.", code="context_length_exceeded"
        )
    answer = _answer_tokens(asked, settings, len(prompt), context)
    stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    return Order(prompt, _config(asked, settings, answer), stops)


def _prompt(asked: CompletionRequest, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    prompt: Any = asked.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, list):
        return prompt
    _check_text(prompt, "prompt")
    return list(tokenizer(prompt)["input_ids"])


def _chat(asked: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not tokenizer.chat_template:
        raise ApiError(400, "This model has no chat template; use /v1/completions.", param="messages")
    messages = [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in asked.messages]
    for message in messages:
        _check_text(message["content"], "messages")
    try:
        return template(tokenizer, messages)
    except Exception as error:  # a template is a program of the checkpoint's: it may refuse roles and orders, in its own way
        raise ApiError(400, f"The model's chat template refuses these messages: {error}", param="messages") from error


def _check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{param}: holds half a surrogate pair, which is no character.", param=param) from error


def _answer_tokens(asked: Asked, settings: ServingSettings, prompt: int, context: int | None) -> int:
    given = getattr(asked, "max_completion_tokens", None) or asked.max_tokens
    room = None if context is None else context - prompt
    if room is not None and room < (given or 1):
        raise ApiError(
            400,
            f"This model's context is {context} tokens; the prompt has {prompt} and the answer was to have up to {given or 1}.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if given is not None and given > settings.max_new_tokens:
        raise ApiError(400, f"max_tokens: at most {settings.max_new_tokens} here, got {given}.", param="max_tokens")
    wanted = given or min(settings.default_new_tokens, settings.max_new_tokens)
    return wanted if room is None else min(wanted, room)


def _config(asked: Asked, settings: ServingSettings, answer: int) -> DecodingConfig:
    given = asked.decoding.model_dump(exclude_none=True) if asked.decoding else {}
    plain = given.get("method", settings.decoding["method"]) != "ar" and not settings.parallel  # its block of 1 is no default for other methods
    knobs = ({} if plain else settings.decoding) | given
    if knobs.get("method") == "ar":
        knobs = {name: value for name, value in knobs.items() if name in given or name == "method"} | (PLAIN if "block_size" not in given else {})
    elif given.get("method") == "jacobi":  # by the book: the server's own extras are left out
        knobs = {name: value for name, value in knobs.items() if name in given or name not in ("drafts", "auto")}
    temperature = asked.temperature or 0.0
    sampling: dict[str, Any] = {"temperature": temperature}
    if temperature:
        sampling |= {"top_p": asked.top_p or 1.0, "seed": asked.seed if asked.seed is not None else secrets.randbits(62)}
    try:
        config = DecodingConfig(**knobs, **sampling, max_new_tokens=answer)
    except ValueError as error:
        raise ApiError(400, f"decoding: {error}", param="decoding") from error
    for name, value, limit in (
        ("block_size x max_blocks", config.block_size * _blocks(config), settings.max_block_size),
        ("verification_size", config.verification_size, settings.max_chains),
    ):
        if value > limit:
            raise ApiError(400, f"decoding: {name} is {value}, at most {limit} here.", param="decoding")
    return config


def _blocks(config: DecodingConfig) -> int:
    return config.max_blocks if config.method in (Method.multi_block, Method.mr) else 1


assert set(KNOBS) < {f.name for f in fields(DecodingConfig)}
