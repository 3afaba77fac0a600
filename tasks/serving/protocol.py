"""Bodies of requests, as OpenAI's API documents them, and its shape of an error. Knows nothing about models.

What would change the answer and is not supported is refused by name, never ignored; what cannot change it (user, metadata, ...) is taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Real = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Token = Annotated[int, Field(ge=0, le=2**31)]


class ApiError(Exception):
    """Becomes {"error": {...}} with this status. param: the field of the body that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's shape. Whatever the message quotes can be written as UTF-8."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    printable = message.encode("utf-8", "replace").decode()
    return {"error": {"message": printable, "type": kind, "param": param and param.encode("utf-8", "replace").decode(), "code": code}}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Decoding(Strict):
    """Knobs of the parallel decoder, this server's extension. They change the number of forwards, never the text."""

    method: Literal["ar", "jacobi", "running_window", "recycling", "multi_block", "mr"] | None = None
    block_size: int | None = Field(None, ge=1, le=2**16)
    max_blocks: int | None = Field(None, ge=1, le=64)
    spawn_ratio: Real | None = Field(None, gt=0, le=1)
    verification_size: int | None = Field(None, ge=1, le=2**10)
    pool_size: int | None = Field(None, ge=0, le=2**10)
    ngram: bool | None = None
    drafts: int | None = Field(None, ge=1, le=2**10)
    auto: bool | None = None


class StreamOptions(Strict):
    include_usage: bool | None = False
    include_obfuscation: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class Asked(Strict):
    """What both kinds of completion share."""

    model: str = Field(max_length=500)
    temperature: Real | None = Field(None, ge=0, le=2)
    top_p: Real | None = Field(None, gt=0, le=1)
    n: Literal[1] | None = Field(1, description="one answer per request")
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=8)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=2**31)
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, Real], Field(max_length=0)] | None = None
    user: str | None = None
    decoding: Decoding | None = None


class CompletionRequest(Asked):
    prompt: (
        str | list[Token] | Annotated[list[str], Field(min_length=1, max_length=1)] | Annotated[list[list[Token]], Field(min_length=1, max_length=1)]
    )
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    logprobs: None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    refusal: None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Asked):
    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31)
    response_format: TextFormat | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
