"""The server's command line: its mistakes are one line, and (slow) it serves over loopback, survives a dead replica, and ends in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import psutil
import pytest

from jacobi_core.decoding.config import DecodingConfig
from pipelines import serve
from pipelines.arguments import parse
from tasks.serving.settings import PLAIN, decoding_of

ROOT = Path(__file__).resolve().parents[2]


def refused(capsys, *argv: str) -> str:
    assert serve.main(list(argv)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "model is missing"),
        (["model=/nope/x"], "model: /nope/x does not exist"),
        (["model={checkpoint}", "port=0"], "port must be at least 1, got 0"),
        (["model={checkpoint}", "port=65536"], "port must be at most 65535"),
        (["model={checkpoint}", "rows=0"], "rows must be at least 1, got 0"),
        (["model={checkpoint}", "dtype=int8"], "dtype must be one of"),
        (["model={checkpoint}", "method=mr", "block_size=0"], "block_size must be at least 1, got 0"),
        (["model={checkpoint}", "block_size=8"], "method=ar decodes one token per forward"),
        (["model={checkpoint}", "api_key_file=/nope/key"], "api_key_file=/nope/key: cannot be read"),
        (["model={checkpoint}", "api_key_file={empty}"], "the API key is empty"),
        (["model={checkpoint}", "port={taken}"], "host=127.0.0.1 port="),
    ],
)
def test_mistakes_are_one_line(checkpoint, tmp_path, capsys, argv, message):
    (tmp_path / "key").write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"checkpoint": str(checkpoint), "empty": str(tmp_path / "key"), "taken": taken.getsockname()[1]}
        assert refused(capsys, *(a.format(**names) for a in argv)).startswith(message)


def test_a_checkpoint_says_how_it_is_decoded(tmp_path):
    assert decoding_of(str(tmp_path)) == PLAIN
    file = tmp_path / "jacobi_forcing.json"
    file.write_text(json.dumps({"name": "round1", "block_size": 16}))
    trained = decoding_of(str(tmp_path))
    assert (trained["block_size"], DecodingConfig(**trained).method.value) == (16, "running_window")
    file.write_text(json.dumps({"decoding": {"method": "mr", "block_size": 8, "max_new_tokens": 9}}))
    assert decoding_of(str(tmp_path)) == {"method": "mr", "block_size": 8}

    def served(*argv: str) -> dict:
        return parse([f"model={tmp_path}", *argv], serve.ServeArguments).settings().decoding

    assert served("method=ar") == PLAIN
    assert served("block_size=4", "auto=false") == {"method": "mr", "block_size": 4, "auto": False}
    assert served("method=jacobi") == {"method": "jacobi", "block_size": 8}
    file.unlink()
    assert served() == PLAIN
    assert served("method=mr") == {"method": "mr"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(question, seconds: float):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := question():
                return found
        except openai.OpenAIError:
            pass
        time.sleep(0.5)
    raise AssertionError("not in time")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_serves_over_loopback_gets_up_again_and_ends_in_order(checkpoint, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    port, since = free_port(), time.time()
    settings = [f"model={checkpoint}", "name=tiny", f"port={port}", f"api_key_file={tmp_path / 'key'}", "method=mr", "block_size=4", "dtype=float64"]
    process = subprocess.Popen([sys.executable, "-m", "pipelines.serve", *settings], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0, timeout=60)

    def ask(**more):
        return client.completions.create(model="tiny", prompt="def add", max_tokens=40, **more)

    try:
        assert until(lambda: client.models.list().data, 900)[0].jacobi["decoder"] == "mr"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0).models.list()
        found = ask()
        chunks = list(ask(stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == found.choices[0].text
        assert chunks[-1].jacobi == found.jacobi
        assert ask(extra_body={"decoding": {"method": "ar", "block_size": 1}}).choices == found.choices
        with pytest.raises(openai.BadRequestError):
            ask(n=2)
        broken_off = ask(stream=True)
        next(iter(broken_off))
        broken_off.close()

        (replica,) = (p for p in psutil.process_iter(["cmdline", "create_time"]) if _is_replica(p, since))
        os.kill(replica.pid, signal.SIGKILL)
        assert until(lambda: ask().choices, 600) == found.choices

        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        assert [line.split()[0] for line in out.splitlines() if line.startswith(("serving", "ending", "ended"))] == ["serving", "ending:", "ended"]
    finally:
        process.kill()


def _is_replica(process: psutil.Process, since: float) -> bool:
    return process.info["create_time"] >= since and any("ServeReplica:jacobi" in part for part in process.info["cmdline"] or ())
