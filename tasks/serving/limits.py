"""What is refused before any route: a missing API key, and a body that is too large, whatever its headers say. Plain ASGI."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tasks.serving.protocol import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
OPEN = ("/health", "/ready")  # probes carry no key


class Limits:
    """Wraps an ASGI app."""

    def __init__(self, app: Any, *, api_key: str | None, max_body_bytes: int) -> None:
        self._app, self._key, self._most = app, api_key, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._key is not None and scope["path"] not in OPEN and not self._known(headers.get(b"authorization", b"")):
            await _refuse(send, 401, "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.", code="invalid_api_key")
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._most:
            await _refuse(send, 413, self._too_large)
            return
        body, more = b"", True
        while more:  # read here, so that a body without a length, or with a wrong one, is cut off too
            message = await receive()
            if message["type"] != "http.request":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
            if len(body) > self._most:
                await _refuse(send, 413, self._too_large)
                return
        given = False

        async def replay() -> MutableMapping[str, Any]:
            nonlocal given
            if given:
                return await receive()  # a disconnect
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _known(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key.encode())

    @property
    def _too_large(self) -> str:
        return f"The body is larger than the {self._most} bytes allowed here."


async def _refuse(send: Send, status: int, message: str, *, code: str | None = None) -> None:
    body = json.dumps(error_body(status, message, code=code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
