"""The routes: OpenAI's, health, readiness and metrics. What they do with a request is in the modules beside this one; nothing here knows Ray."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from tasks.serving.answers import Answer
from tasks.serving.asked import order
from tasks.serving.limits import Limits
from tasks.serving.protocol import ApiError, ChatRequest, CompletionRequest, ErrorBody, error_body

if TYPE_CHECKING:
    from tasks.serving.model import Service

log = logging.getLogger(__name__)
RETRY_SECONDS = "1"


def create_app(service: Service) -> FastAPI:
    """The app of one replica."""
    settings, started = service.settings, int(time.time())
    errors: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503)}
    app = FastAPI(
        title="jacobi-forcing", description="OpenAI's API in front of a causal parallel decoder.", version="1", redoc_url=None, docs_url=None
    )
    app.add_middleware(Limits, api_key=settings.api_key, max_body_bytes=settings.max_body_bytes)
    described = {
        "id": settings.name,
        "object": "model",
        "created": started,
        "owned_by": "jacobi-forcing",
        "jacobi": {"decoder": settings.decoding["method"], "parallel": settings.parallel, "decoding": settings.decoding, "context": service.context},
    }

    async def complete(asked: CompletionRequest | ChatRequest) -> Response:
        wanted = order(asked, service.tokenizer, settings, service.context)
        if (problem := service.worker.problem()) is not None:
            raise ApiError(503, f"This replica is not well: {problem}.", headers={"Retry-After": RETRY_SECONDS})
        if service.worker.in_flight >= settings.max_requests:
            raise ApiError(
                429, f"{settings.max_requests} requests are in flight; come back later.", code="overloaded", headers={"Retry-After": RETRY_SECONDS}
            )
        answer, pieces = Answer(asked, wanted), service.worker.decode(wanted)
        headers = {"X-Jacobi-Decoder": wanted.config.method.value}
        if asked.stream:
            try:
                first = await anext(pieces)
            except ValueError as error:
                raise ApiError(400, f"{error}.", code="context_length_exceeded") from error
            return StreamingResponse(answer.events(first, pieces), media_type="text/event-stream", headers={**headers, "Cache-Control": "no-cache"})
        try:
            body = await answer.whole(pieces)
        except ValueError as error:
            raise ApiError(400, f"{error}.", code="context_length_exceeded") from error
        figures = body["jacobi"]
        headers["X-Jacobi-Tokens-Per-Forward"] = str(figures["tokens_per_forward"])
        headers["X-Jacobi-Mean-Acceptance-Length"] = str(figures["mean_acceptance_length"])
        return JSONResponse(body, headers=headers)

    @app.post("/v1/completions", responses=errors)
    async def completions(asked: CompletionRequest) -> Response:
        """The text that follows a prompt."""
        return await complete(asked)

    @app.post("/v1/chat/completions", responses=errors)
    async def chat_completions(asked: ChatRequest) -> Response:
        """The next message of a conversation."""
        return await complete(asked)

    @app.get("/v1/models", responses={401: {"model": ErrorBody}})
    async def models() -> dict[str, Any]:
        """The one model, and how it is decoded."""
        return {"object": "list", "data": [described]}

    @app.get("/v1/models/{name:path}", responses=errors)
    async def model(name: str) -> dict[str, Any]:
        if name != settings.name:
            raise ApiError(404, f"The model `{name}` does not exist; this server has `{settings.name}`.", param="model", code="model_not_found")
        return described

    @app.get("/health")
    async def health() -> Response:
        """Does this replica answer at all?"""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses={503: {"model": ErrorBody}})
    async def ready() -> Response:
        """Will it decode?"""
        if (problem := service.worker.problem()) is not None:
            raise ApiError(503, f"This replica is not well: {problem}.")
        return JSONResponse({"status": "ready", "in_flight": service.worker.in_flight})

    @app.get("/metrics", responses={401: {"model": ErrorBody}})
    async def metrics() -> Response:
        """In Prometheus' text format."""
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        if error.status < 500:
            service.metrics.add("jacobi_requests_total", label="refused")
        return JSONResponse(error_body(error.status, error.message, param=error.param, code=error.code), error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        """The first mistake, without the value: it may be long, and no JSON."""
        service.metrics.add("jacobi_requests_total", label="refused")
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        where = ".".join(place)[:200]
        if first["type"] == "json_invalid":
            return JSONResponse(error_body(400, "The body is no valid JSON."), 400)
        known = first["type"] != "extra_forbidden"
        message = f"{where or 'body'}: {first['msg'] if known else 'this parameter is not supported'}."
        return JSONResponse(error_body(400, message, param=where or None, code=None if known else "unsupported_parameter"), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(error.status_code, message), error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        log.error("a request has failed", exc_info=error)
        return JSONResponse(error_body(500, "The server has failed to answer; its log tells why."), 500)

    json.dumps(described)  # a setting that is no JSON must not wait for the first request
    return app
