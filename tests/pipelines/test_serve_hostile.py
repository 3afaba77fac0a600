"""Hostile and drawn bodies: whatever arrives, the answer is an answer and never a server error."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core import NotSet

from tests.pipelines.tiny_serving import BODY, http, loaded, service

__all__ = ["http", "loaded", "service"]  # fixtures


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"\xff\xfe", 400),
        (b"[" * 10_000, 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', 400),
        (b'{"model": "tiny\\udfff", "prompt": "a"}', 400),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"model": "tiny", "prompt": "a\\u0000b", "max_tokens": 2}', 200),
        (json.dumps({**BODY, "user": "x" * 20_000}).encode(), 413),
    ],
)
def test_hostile_bodies_are_answered(http, content, status):
    answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    if status != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_a_length_is_cut_off(http):
    sent = []

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            sent.append(1)
            yield b" " * 1000

    assert http.post("/v1/completions", content=endless()).status_code == 413


READ = ["GET /v1/models", "GET /v1/models/{name}", "GET /health", "GET /metrics"]
WRITE = ["POST /v1/completions", "POST /v1/chat/completions"]
VALID, BROKEN = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(("name", "mode"), [*((name, VALID) for name in READ + WRITE), *((name, BROKEN) for name in WRITE)])
def test_nothing_the_schema_allows_or_forbids_makes_a_server_error(http, name, mode):
    schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    (operation,) = (o for o in (found.ok() for found in schema.get_all_operations()) if o.label == name)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def check(case, known):
        body = case.body
        if isinstance(body, dict) and known:
            body = {**body, "model": "tiny"}
            if name == "POST /v1/completions" and not isinstance(body.get("prompt"), str):
                body["prompt"] = "add"
        content = {} if isinstance(body, NotSet) else {"content": body if isinstance(body, bytes) else json.dumps(body)}
        answer = http.request(case.method, case.formatted_path, headers={"content-type": "application/json"}, **content)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    check()
