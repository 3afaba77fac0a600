"""The server's app without Ray: what the openai client gets, what is refused and how, and what happens to a reader who goes."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from jacobi_core.decoding.config import DecodingConfig
from tasks.serving.app import create_app
from tasks.serving.asked import Order
from tasks.serving.model import Service
from tasks.serving.settings import PLAIN, ServingSettings
from tests.pipelines.tiny_serving import BODY, PROMPT, WINDOW, client, http, loaded, offline, service, serving, text_of

__all__ = ["client", "http", "loaded", "service"]  # fixtures


def test_a_completion_is_offline_greedy_whole_and_streamed(loaded, client):
    ids = loaded[1](PROMPT)["input_ids"]
    expected = offline(loaded, ids, 30)
    raw = client.completions.with_raw_response.create(model="tiny", prompt=PROMPT, max_tokens=30)
    found = raw.parse()
    assert found.choices[0].text == text_of(loaded, expected)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), len(expected))
    assert found.jacobi["decoder"] == raw.headers["x-jacobi-decoder"] == "running_window"
    assert found.jacobi["tokens_per_forward"] == float(raw.headers["x-jacobi-tokens-per-forward"]) >= 1
    assert found.jacobi["mean_acceptance_length"] == pytest.approx(found.jacobi["tokens_per_forward"] - 1, abs=1e-3)
    chunks = list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == found.choices[0].text
    assert chunks[-1].usage == found.usage and not chunks[-1].choices
    assert chunks[-2].choices[0].finish_reason == found.choices[0].finish_reason == ("length" if len(expected) == 30 else "stop")
    assert chunks[-2].jacobi == found.jacobi
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=30)
    assert by_ids.choices[0].text == found.choices[0].text


def test_a_chat_is_offline_greedy_whole_and_streamed(loaded, client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "add 3 "}, {"type": "text", "text": "to each"}]}]
    ids = loaded[1].apply_chat_template([{"role": "user", "content": "add 3 to each"}], add_generation_prompt=True, return_dict=False)
    found = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=20, temperature=0, top_p=0.9)
    assert found.choices[0].message.content == text_of(loaded, offline(loaded, ids, 20))
    assert found.usage.prompt_tokens == len(ids)
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=20, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == found.choices[0].message.content
    assert len(chunks) >= 3 and all(c.id == chunks[0].id for c in chunks)


def test_an_answer_is_cut_at_a_stop_string_and_counts_no_token_after_it(loaded, client):
    ids = loaded[1](PROMPT)["input_ids"]
    answer = offline(loaded, ids, 40)
    whole = text_of(loaded, answer)
    stop = whole[8:10]
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stop=["never said", stop])
    assert found.choices[0].text == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    assert stop in text_of(loaded, answer[: found.usage.completion_tokens])
    assert stop not in text_of(loaded, answer[: found.usage.completion_tokens - 1])
    streamed = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == found.choices[0].text


def test_a_seed_decides_the_samples_whatever_the_decoder_and_the_company(client):
    def ask(seed, **more):
        return client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=1.5, top_p=0.95, seed=seed, **more).choices[0].text

    first = ask(7)
    assert ask(7) == first != ask(8)
    assert ask(7, extra_body={"decoding": {"method": "ar"}}) == first
    assert ask(7, extra_body={"decoding": {"method": "mr", "block_size": 8, "drafts": 2}}) == first
    assert client.completions.create(model="tiny", prompt=PROMPT, temperature=2, seed=None) is not None


def test_requests_turn_the_knobs_and_the_text_stays(client):
    texts, methods = set(), ["ar", "jacobi", "running_window", "recycling", "multi_block", "mr"]
    for method in methods:
        found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, extra_body={"decoding": {"method": method}})
        texts.add(found.choices[0].text)
        assert found.jacobi["decoder"] == method
        assert (found.jacobi["tokens_per_forward"] == 1) or method != "ar"
    assert len(texts) == 1


def test_a_plain_model_is_served_and_says_so(loaded):
    with serving(loaded, decoding=dict(PLAIN)) as service:
        client = TestClient(create_app(service))
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["jacobi"]["parallel"], model["jacobi"]["decoder"]) == ("tiny", False, "ar")
        found = client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 10}).json()
        assert (found["jacobi"]["decoder"], found["jacobi"]["tokens_per_forward"]) == ("ar", 1)
        faster = client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "decoding": {"method": "mr"}}).json()
        assert faster["choices"] == found["choices"]


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "add"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("completions", {**BODY, "n": 2}, 400, "n: "),
        ("completions", {**BODY, "model": "gpt-4"}, 404, "The model `gpt-4` does not exist"),
        ("completions", {**BODY, "prompt": ""}, 400, "The prompt has no token"),
        ("completions", {**BODY, "prompt": "add " * 300}, 400, "The prompt has "),
        ("completions", {**BODY, "prompt": ["a", "b"]}, 400, "prompt"),
        ("completions", {**BODY, "prompt": [5, 10**6]}, 400, "a prompt's token ids must be between 0 and "),
        ("completions", {**BODY, "max_tokens": 65}, 400, "max_tokens: at most 64 here, got 65"),
        ("completions", {**BODY, "max_tokens": 0}, 400, "max_tokens: "),
        ("completions", {**BODY, "temperature": -1}, 400, "temperature: "),
        ("completions", {**BODY, "logprobs": 3}, 400, "logprobs: "),
        ("completions", {**BODY, "best_of": 3}, 400, "best_of: "),
        ("completions", {**BODY, "beams": 3}, 400, "beams: this parameter is not supported"),
        ("completions", {**BODY, "stream_options": {"include_usage": True}}, 400, "stream_options: only allowed with stream=true"),
        ("completions", {**BODY, "decoding": {"block_size": 1000}}, 400, "decoding: block_size x max_blocks is 1000, at most 128 here"),
        ("completions", {**BODY, "decoding": {"verification_size": 9}}, 400, "decoding: verification_size is 9, at most 8 here"),
        ("completions", {**BODY, "decoding": {"method": "ar", "block_size": 4}}, 400, "decoding: method=ar decodes one token per forward"),
        ("completions", {**BODY, "decoding": {"method": "zigzag"}}, 400, "decoding.method: "),
        ("completions", {**BODY, "stop": ["a"] * 9}, 400, "stop"),
        ("completions", {**BODY, "seed": 2**63}, 400, "seed: "),
        ("completions", [1], 400, "body: "),
        ("chat/completions", {**CHAT, "messages": []}, 400, "messages: "),
        ("chat/completions", {**CHAT, "messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role: "),
        ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools: "),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format.type: "),
        ("chat/completions", {**CHAT, "max_completion_tokens": 65}, 400, "max_tokens: at most 64"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused_in_openais_words(http, path, body, status, message, stream):
    answer = http.post(f"/v1/{path}", json={**body, "stream": stream} if isinstance(body, dict) and "stream_options" not in body else body)
    assert answer.status_code == status
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].startswith(message), error


def test_unknown_paths_and_methods_have_the_shape_of_an_error(http):
    for answer, status in ((http.get("/v1/nothing"), 404), (http.get("/v1/completions"), 405), (http.get("/v1/models/other"), 404)):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert http.get("/v1/models/tiny").json()["id"] == "tiny"


def test_a_key_is_asked_for_everywhere_but_by_probes(loaded):
    with serving(loaded, api_key="secret") as service:
        http = TestClient(create_app(service))
        assert "secret" not in repr(service)
        assert (http.get("/health").status_code, http.get("/ready").status_code) == (200, 200)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": b"Bearer \xff"}):
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                assert http.get(path, headers=headers).status_code == 401
        answer = http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert http.post("/v1/completions", json=BODY, headers={"authorization": "Bearer secret"}).status_code == 200


def test_who_is_one_too_many_is_told_to_come_back(loaded):
    with serving(loaded, max_requests=1) as service:
        http = TestClient(create_app(service))
        service.worker.in_flight += 1
        answer = http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"]) == (429, "1", "overloaded")
        service.worker.in_flight -= 1
        assert http.post("/v1/completions", json=BODY).status_code == 200


def orders(loaded, count: int, tokens: int = 30) -> list[Order]:
    texts = [f"def add_{i}(xs):\n" + "    return x\n" * (i % 5) for i in range(count)]
    return [Order(loaded[1](t)["input_ids"], DecodingConfig(**WINDOW, max_new_tokens=tokens), ()) for t in texts]


async def said(service: Service, order: Order, *, leave_after: int | None = None) -> str:
    text, pieces = "", service.worker.decode(order)
    async for piece in pieces:
        text += piece.text
        if leave_after is not None and len(text) >= leave_after:
            await pieces.aclose()
            return text
    return text


def test_many_at_once_and_some_who_leave(loaded, service):
    """Every answer is offline greedy; whoever goes frees a row: all 30 pass through 4 rows."""
    wanted = orders(loaded, 30)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(said(service, o, leave_after=3 if i % 3 == 0 else None) for i, o in enumerate(wanted)))

    before = service.metrics.page().decode()
    found = asyncio.run(all_of_them())
    for i, (order, text) in enumerate(zip(wanted, found, strict=True)):
        whole = text_of(loaded, offline(loaded, order.prompt, 30))
        assert text == whole if i % 3 else whole.startswith(text)
    assert service.worker.in_flight == 0
    deadline = time.monotonic() + 10
    while service.worker._engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not service.worker._jobs
    assert number(service.metrics.page().decode(), 'jacobi_requests_total{outcome="cancelled"}') > number(
        before, 'jacobi_requests_total{outcome="cancelled"}'
    )


def number(page: str, name: str) -> float:
    return next((float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + " ")), 0.0)


def test_a_reader_who_stops_reading_holds_no_row(loaded, service):
    """The answer is decoded to its end while nobody takes it."""
    (order,) = orders(loaded, 1)

    async def slow() -> str:
        pieces = service.worker.decode(order)
        text = (await anext(pieces)).text
        deadline = time.monotonic() + 10
        while service.worker._jobs and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert not service.worker._jobs
        return text + "".join([piece.text async for piece in pieces])

    assert asyncio.run(slow()) == text_of(loaded, offline(loaded, order.prompt, 30))


def test_metrics_count_what_was_decoded(loaded):
    with serving(loaded) as service:
        http = TestClient(create_app(service))
        found = http.post("/v1/completions", json={**BODY, "max_tokens": 12}).json()
        http.post("/v1/completions", json={**BODY, "n": 2})
        page = http.get("/metrics").text
        assert number(page, "jacobi_answer_tokens_total") == found["usage"]["completion_tokens"]
        assert number(page, "jacobi_prompt_tokens_total") == found["usage"]["prompt_tokens"]
        assert number(page, "jacobi_text_forwards_total") == number(page, "jacobi_forwards_total") == found["jacobi"]["forwards"]
        assert number(page, "jacobi_mean_acceptance_length") == pytest.approx(found["jacobi"]["mean_acceptance_length"], abs=1e-3)
        assert number(page, 'jacobi_requests_total{outcome="refused"}') == 1
        assert number(page, "jacobi_time_to_first_token_seconds_count") == number(page, "jacobi_request_seconds_count") == 1


def test_an_engine_that_ends_leaves_nobody_waiting(loaded, caplog):
    with serving(loaded) as service:
        http, broken = TestClient(create_app(service), raise_server_exceptions=False), threading.Event()

        def crash():
            broken.set()
            raise RuntimeError("out of memory")

        service.worker._engine.step = crash
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**BODY, "stream": stream})
            if not stream:
                assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
            else:  # the thread is dead by now
                assert answer.status_code == 503 and "thread has ended" in answer.json()["error"]["message"]
        assert broken.is_set() and "out of memory" in caplog.text
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == 200


def test_forwards_that_fail_make_a_replica_unwell(loaded, monkeypatch):
    with serving(loaded) as service:
        http = TestClient(create_app(service), raise_server_exceptions=False)
        monkeypatch.setattr("jacobi_core.decoding.batch.BatchForward.logits_of", lambda *_: 1 / 0)
        statuses = [http.post("/v1/completions", json={**BODY, "stream": i == 1}).status_code for i in range(4)]
        assert statuses == [500, 200, 500, 503]  # a stream's status is out before; its error is an event
        assert http.get("/ready").status_code == 503


def test_a_stalled_engine_is_found(service):
    service.worker._beat = time.monotonic() - 1000
    assert service.worker.problem() is None, "nothing to do is no stall"
    service.worker.in_flight += 1
    try:
        assert "no forward has finished for 1000 seconds" in service.worker.problem()
    finally:
        service.worker.in_flight -= 1
        service.worker._beat = time.monotonic()


def test_settings_are_checked(loaded):
    good = ServingSettings(model="m", name="n")
    for wrong, message in (({"rows": 0}, "rows must be"), ({"api_key": " "}, "API key is empty"), ({"dtype": "int8"}, "dtype must be")):
        with pytest.raises(ValueError, match=message):
            replace(good, **wrong)
    with pytest.raises(ValueError, match="cannot be served"), serving(loaded, decoding={"method": "mr", "block_size": 0}):
        pass
