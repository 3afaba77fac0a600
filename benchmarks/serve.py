"""How the server answers many clients at once: the openai client over loopback against `python -m pipelines.serve`; never a test.

    python -m benchmarks.serve --model DIR [--label NAME] [--concurrency 1 4 16 50] [--requests 50] [--flat 2000] [--no-kill] [--json]

Every prompt is decoded offline first, greedily, one token at a time and in float32; then streams ask the server for the same, with its own
decoder and, taking turns in the same server, with AR (a request's `decoding` field). --json prints a list of {"name", "model", "value"} on
stdout; what happens goes to stderr. At concurrency C:

equal_share@C           answers equal to offline greedy, of both decoders
lost@C, server_errors@C streams that did not end as they should; statuses of 500 and above and broken connections among them
tps@C, ar_tps@C, vs_ar_tps@C    answer tokens per second, of ours, of AR, and their ratio
p50@C, p95@C, p99@C, ar_p50@C   seconds from asking to the whole answer
ttft_p50@C, ar_ttft_p50@C       seconds from asking to the first text
killed_...              a replica is killed under 16 streams, whose clients ask again: lost and equal_share after that, errors seen on the way,
                        and seconds until the next answer
flat_growth_mb          resident memory of the replica after --flat requests, less that after a tenth of them; flat_lost, flat_server_errors
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil

AR = {"decoding": {"method": "ar", "block_size": 1}}
NAME = "benchmark"
PATIENCE = 600.0  # seconds for a server to begin, and for a client that asks again after a replica was killed


@dataclass(frozen=True)
class Question:
    text: str
    answer: str  # offline greedy's


@dataclass
class Outcome:
    """Of one stream. error: what the client was told, None where it ended as it should."""

    text: str
    tokens: int
    seconds: float
    first: float
    tpf: float
    error: Exception | None = None

    @property
    def server_error(self) -> bool:
        return isinstance(self.error, openai.APIConnectionError | openai.InternalServerError) or getattr(self.error, "status_code", 0) >= 500


def questions(model: str, count: int, new_tokens: int) -> list[Question]:
    """Problems of minicode's test split as a user would put them, and what the checkpoint says offline."""
    import torch

    from jacobi_core.decoding.config import DecodingConfig
    from jacobi_core.decoding.generate import generate
    from jacobi_core.decoding.tokens import TokenRules
    from jacobi_core.hub import load_model, load_tokenizer
    from tasks.problem_sets import minicode

    weights, tokenizer = load_model(model), load_tokenizer(model)
    rules = TokenRules.of(weights, tokenizer)
    texts = [problem.prompt for problem in minicode.generate(split="test", count=count, seed=0)]
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True, return_dict=False) for t in texts]
    config, found = DecodingConfig(method="ar", block_size=1, max_new_tokens=new_tokens), []
    for one in ids:
        tokens = generate(weights, torch.tensor(one), config, rules=rules).new_tokens.tolist()
        found.append(tokenizer.decode([t for t in tokens if t not in rules.eos_ids], skip_special_tokens=True))
    return [Question(text, answer) for text, answer in zip(texts, found, strict=True)]


@contextlib.contextmanager
def server(model: str, port: int, *settings: str) -> Iterator[str]:
    """Its base URL. Raises RuntimeError where it does not begin."""
    command = [sys.executable, "-m", "pipelines.serve", f"model={model}", f"name={NAME}", f"port={port}", *settings]
    process = subprocess.Popen(command, stdout=sys.stderr, cwd=Path(__file__).resolve().parent.parent)
    url, until = f"http://127.0.0.1:{port}/v1", time.monotonic() + PATIENCE
    try:
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not begin (exit code {process.poll()})")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENCE)


def _answers(url: str) -> bool:
    try:
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0, timeout=5) as client:
            return bool(client.models.list().data)
    except openai.OpenAIError:
        return False


async def ask(client: openai.AsyncOpenAI, question: Question, new_tokens: int, extra: dict) -> Outcome:
    start, first, text, tokens, tpf, ended = time.perf_counter(), 0.0, "", 0, 0.0, False
    error: Exception | None = None
    try:
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": question.text}],
            max_completion_tokens=new_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        async for chunk in stream:
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.delta.content:
                    first = first or time.perf_counter() - start
                    text += choice.delta.content
                if choice.finish_reason:
                    ended, tpf = True, chunk.jacobi["tokens_per_forward"]
        if not ended:
            error = RuntimeError("the stream broke off")
    except Exception as found:  # whatever a client may be told is a finding here
        error = found
    return Outcome(text, tokens, time.perf_counter() - start, first, tpf, error)


async def load(
    url: str, asked: Sequence[Question], concurrency: int, new_tokens: int, extra: dict, *, retry: bool = False
) -> tuple[list[Outcome], float]:
    """So many streams at once until every question has been asked; (outcomes in order, seconds of it all). retry: ask again after an error."""
    turns, found = asyncio.Semaphore(concurrency), [[] for _ in asked]
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=PATIENCE) as client:

        async def one(i: int) -> None:
            async with turns:
                until = time.monotonic() + PATIENCE
                while True:
                    found[i].append(await ask(client, asked[i], new_tokens, extra))
                    if not (retry and found[i][-1].error and time.monotonic() < until):
                        return
                    await asyncio.sleep(0.5)

        start = time.perf_counter()
        await asyncio.gather(*(one(i) for i in range(len(asked))))
        return [outcome for outcomes in found for outcome in outcomes], time.perf_counter() - start


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def equal_share(outcomes: Sequence[Outcome], asked: Sequence[Question]) -> float:
    good = [(o, q) for o, q in zip(outcomes, asked, strict=True) if o.error is None]
    return sum(o.text == q.answer for o, q in good) / max(len(good), 1)


def under_load(url: str, pool: Sequence[Question], concurrency: int, requests: int, new_tokens: int) -> dict[str, float]:
    asked = [pool[i % len(pool)] for i in range(requests)]
    halves, at, both = [asked[: len(asked) // 2], asked[len(asked) // 2 :]], f"@{concurrency}", {}
    for turn, part in enumerate(halves):  # taking turns, each time another one first
        order = [("", {}), ("ar_", AR)]
        for name, extra in order[turn % 2 :] + order[: turn % 2]:
            outcomes, took = asyncio.run(load(url, part, concurrency, new_tokens, extra))
            seen = both.setdefault(name, ([], [0.0]))
            seen[0].extend(outcomes)
            seen[1][0] += took
    values: dict[str, float] = {}
    every = [o for outcomes, _ in both.values() for o in outcomes]
    for name, (outcomes, took) in both.items():
        good = [o for o in outcomes if o.error is None]
        values[f"{name}tps{at}"] = sum(o.tokens for o in good) / took[0]
        for share in (50, 95, 99) if not name else (50,):
            values[f"{name}p{share}{at}"] = quantile([o.seconds for o in good], share / 100)
        values[f"{name}ttft_p50{at}"] = quantile([o.first for o in good], 0.5)
        if not name and good:
            values[f"tpf{at}"] = statistics.mean(o.tpf for o in good)
    values[f"vs_ar_tps{at}"] = values[f"tps{at}"] / values[f"ar_tps{at}"] if values[f"ar_tps{at}"] else float("nan")
    values[f"equal_share{at}"] = min(equal_share(outcomes, asked) for outcomes, _ in both.values())
    values[f"lost{at}"] = sum(o.error is not None for o in every)
    values[f"server_errors{at}"] = sum(o.server_error for o in every)
    return values


def replicas(since: float) -> list[psutil.Process]:
    """Ray Serve's, begun after `since`."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        if process.info["create_time"] >= since and any("ServeReplica:jacobi" in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


def killed(url: str, pool: Sequence[Question], new_tokens: int, since: float) -> dict[str, float]:
    asked = [pool[i % len(pool)] for i in range(64)]

    async def run() -> tuple[list[Outcome], float]:
        work = asyncio.create_task(load(url, asked, 16, new_tokens, {}, retry=True))
        await asyncio.sleep(1.0)
        (victim, *_) = replicas(since)
        os.kill(victim.pid, signal.SIGKILL)
        start = time.perf_counter()
        while not await asyncio.to_thread(_answers, url):
            await asyncio.sleep(0.2)
        back = time.perf_counter() - start
        return (await work)[0], back

    outcomes, back = asyncio.run(run())
    good = [o for o in outcomes if o.error is None]
    answers = {q.answer for q in pool}
    return {
        "killed_lost": len(asked) - len(good),
        "killed_errors": len(outcomes) - len(good),
        "killed_equal_share": sum(o.text in answers for o in good) / max(len(good), 1),
        "killed_back_after_s": back,
    }


def flat(url: str, pool: Sequence[Question], requests: int, since: float) -> dict[str, float]:
    """Short answers, 16 at a time; some of them are refused, so that this path is in it too."""
    sizes, lost, errors = [], 0, 0
    for part in range(10):
        asked = [pool[i % len(pool)] for i in range(requests // 10)]
        outcomes, _ = asyncio.run(load(url, asked, 16, 16, {}))
        outcomes += asyncio.run(load(url, asked[:5], 5, 16, {"decoding": {"block_size": 4096}}))[0]
        refused = [o for o in outcomes if isinstance(o.error, openai.BadRequestError)]
        lost += sum(o.error is not None for o in outcomes) - len(refused)
        errors += sum(o.server_error for o in outcomes)
        sizes.append(sum(p.memory_info().rss for p in replicas(since)) / 2**20)
        print(f"  after {(part + 1) * (requests // 10)} requests: {sizes[-1]:.1f} MB", file=sys.stderr, flush=True)
    return {"flat_growth_mb": sizes[-1] - sizes[0], "flat_lost": lost, "flat_server_errors": errors}


def main(arguments: argparse.Namespace) -> None:
    pool = questions(arguments.model, arguments.prompts, arguments.new_tokens)
    since, values = time.time(), {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with server(arguments.model, port, f"rows={arguments.rows}", *arguments.setting) as url:
        asyncio.run(load(url, pool[:4], 4, arguments.new_tokens, {}))  # what a first request costs once
        for concurrency in arguments.concurrency:
            requests = max(arguments.requests if concurrency > 1 else arguments.requests // 4, concurrency * 2)
            found = under_load(url, pool, concurrency, requests, arguments.new_tokens)
            print(f"== {concurrency} streams: {json.dumps({k: round(v, 3) for k, v in found.items()})}", file=sys.stderr, flush=True)
            values |= found
        if not arguments.no_kill:
            values |= killed(url, pool, arguments.new_tokens, since)
        if arguments.flat:
            values |= flat(url, pool, arguments.flat, since)
    label = arguments.label or Path(arguments.model).name
    rows = [{"name": name, "model": label, "value": round(value, 4)} for name, value in values.items()]
    print(json.dumps(rows, indent=1) if arguments.json else "\n".join(f"{r['model']:<16} {r['name']:<22} {r['value']:.3f}" for r in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--label")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 50])
    parser.add_argument("--requests", type=int, default=100, help="per concurrency and decoder, at least twice as many as streams")
    parser.add_argument("--prompts", type=int, default=25)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--flat", type=int, default=2000, help="requests of the memory measurement; 0 leaves it out")
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("setting", nargs="*", help="settings of pipelines.serve, as key=value")
    return parser.parse_args()


if __name__ == "__main__":
    main(_arguments())
