"""Bodies of answers, whole and as a stream of server-sent events, with what the decoder did in the field `jacobi`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.serving.asked import Order
from tasks.serving.protocol import ApiError, ChatRequest, CompletionRequest, error_body
from tasks.serving.worker import Piece

if TYPE_CHECKING:
    from jacobi_core.decoding.stats import DecodingStats

FINISH = {"eos": "stop", "criteria": "stop", "length": "length"}
BROKEN = "The answer was ended by an error in the decoder; the server's log tells more."
DONE = "data: [DONE]\n\n"


@dataclass
class Answer:
    """One answer's envelope."""

    asked: CompletionRequest | ChatRequest
    order: Order
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.chat = isinstance(self.asked, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"

    async def whole(self, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        """Raises ApiError (500) where the decoder failed."""
        text = ""
        async for piece in pieces:
            text += piece.text
        if piece.reason not in FINISH:
            raise ApiError(500, BROKEN)
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": FINISH[piece.reason]}
        return self._envelope(choices=[choice], chunk=False) | {"usage": self._usage(piece.stats), "jacobi": self.figures(piece.stats)}

    async def events(self, first: Piece, pieces: AsyncGenerator[Piece]) -> AsyncIterator[str]:
        """`first` has been taken from `pieces` already: an error before it is an ordinary answer with its status."""
        piece = first
        try:
            if self.chat:
                yield self._event([self._choice({"role": "assistant", "content": ""}, None)])
            while True:
                if piece.text:
                    yield self._event([self._choice({"content": piece.text} if self.chat else piece.text, None)])
                if piece.reason is not None:
                    break
                piece = await anext(pieces)
        finally:  # a reader who has gone: his row is free now, not when somebody tidies up
            await pieces.aclose()
        if piece.reason not in FINISH:
            yield f"data: {json.dumps(error_body(500, BROKEN))}\n\n" + DONE
            return
        yield self._event([self._choice({} if self.chat else "", FINISH[piece.reason])], jacobi=self.figures(piece.stats))
        if self.asked.stream_options and self.asked.stream_options.include_usage:
            yield self._event([], usage=self._usage(piece.stats))
        yield DONE

    def figures(self, stats: DecodingStats) -> dict[str, Any]:
        return {
            "decoder": self.order.config.method.value,
            "forwards": stats.forwards,
            "tokens_per_forward": round(stats.tpf, 4),
            "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
            "tokens_by_source": dict(stats.accepted_from),
        }

    def _choice(self, delta: Any, reason: str | None) -> dict[str, Any]:
        return {"index": 0, **({"delta": delta} if self.chat else {"text": delta}), "logprobs": None, "finish_reason": reason}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps(self._envelope(choices=choices, chunk=True) | more, separators=(',', ':'))}\n\n"

    def _envelope(self, *, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model, "choices": choices}

    def _usage(self, stats: DecodingStats) -> dict[str, Any]:
        prompt = len(self.order.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": stats.tokens, "total_tokens": prompt + stats.tokens}
