"""A tiny server without Ray, as pytest fixtures: import them where they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import openai
import pytest
import torch
from starlette.testclient import TestClient

from jacobi_core import hub
from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.tokens import TokenRules
from tasks.serving.app import create_app
from tasks.serving.model import Service, service_of
from tasks.serving.settings import ServingSettings

WINDOW = {"method": "running_window", "block_size": 4, "ngram": True}
PROMPT = "def add_3(xs):\n    return"


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return hub.load_model(checkpoint, dtype="float64"), hub.load_tokenizer(checkpoint), str(checkpoint)


@contextlib.contextmanager
def serving(loaded, **changed) -> Iterator[Service]:
    model, tokenizer, folder = loaded
    limits = dict(rows=4, kv_megabytes=16, max_prompt_tokens=100, max_new_tokens=64, default_new_tokens=24, max_body_bytes=20_000)
    service = service_of(model, tokenizer, ServingSettings(**{"model": folder, "name": "tiny", "decoding": WINDOW, **limits, **changed}))
    try:
        yield service
    finally:
        service.worker.close()


@pytest.fixture(scope="module")
def service(loaded) -> Iterator[Service]:
    with serving(loaded) as found:
        yield found


@pytest.fixture(scope="module")
def http(service) -> TestClient:
    return TestClient(create_app(service), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def client(http) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="-", http_client=http, max_retries=0)


def offline(loaded, ids: list[int], tokens: int) -> list[int]:
    """Greedy AR, by the decoder that the other tests have proven."""
    model, tokenizer, _ = loaded
    config = DecodingConfig(method="ar", block_size=1, max_new_tokens=tokens)
    return generate(model, torch.tensor(ids), config, rules=TokenRules.of(model, tokenizer)).new_tokens.tolist()


def text_of(loaded, ids: list[int]) -> str:
    """An EOS is no part of the text, though this tiny model's are ordinary tokens."""
    model, tokenizer, _ = loaded
    ids = ids[:-1] if ids and ids[-1] in TokenRules.of(model, tokenizer).eos_ids else ids
    return tokenizer.decode(ids, skip_special_tokens=True)


BODY = {"model": "tiny", "prompt": "add", "max_tokens": 4}
