"""`python -m pipelines.serve model=DIR`: a checkpoint behind OpenAI's HTTP API, on Ray Serve (extra `serve`).

Wiring only: arguments, Ray, signals. The server is `tasks.serving`, the decoder `jacobi_core.serving`.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jacobi_core.decoding.config import DecodingConfig, Method
from pipelines.arguments import run_tool
from tasks.cluster import start_ray, stop_local_ray
from tasks.serving.settings import PLAIN, ServingSettings, decoding_for
from tasks.stage import ClusterConfig, UserError


@dataclass
class ServeArguments:
    """python -m pipelines.serve model=DIR: a checkpoint behind OpenAI's HTTP API. A plain AR model is served too, one token per forward.

    python -m pipelines.serve model=DIR
    curl http://127.0.0.1:8000/v1/models
    python -c 'import openai; print(openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-").models.list())'

    The same folder is an ordinary checkpoint. Elsewhere it says the same, in one token per forward unless noted:
    transformers   AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True).generate(...)   decodes in parallel, one prompt at a time
    lm-eval        lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True             scores it, decoding in parallel
    vLLM           vllm serve DIR                                                                    AR only; kernels for many users at once
    docs/serving.md tells which is good for what.
    """

    model: Annotated[str, "checkpoint folder or hub id"]
    name: Annotated[str | None, "what requests call it; by default the folder's name"] = None
    host: Annotated[str, "address to listen on; the default is reached from this machine only"] = "127.0.0.1"
    port: Annotated[int, "to listen on"] = 8000
    api_key_file: Annotated[str | None, "a file with the key that requests must carry; none asks for no key"] = None
    method: Annotated[Method | None, "of the decoder; none: as the checkpoint was trained and searched, ar where it was not"] = None
    block_size: Annotated[int | None, "tokens refreshed by one forward; none: the checkpoint's"] = None
    ngram: Annotated[bool | None, "also draft what followed the last tokens where they occurred before; none: as the checkpoint says"] = None
    auto: Annotated[bool | None, "feed only as much as pays, the less the more texts there are; none: as the checkpoint says"] = None
    dtype: Annotated[str, "float32, bfloat16 or float64"] = ServingSettings.dtype
    rows: Annotated[int, "texts that a replica decodes together"] = ServingSettings.rows
    kv_megabytes: Annotated[int, "a replica's memory for their keys and values; who does not fit waits"] = ServingSettings.kv_megabytes
    max_prompt_tokens: Annotated[int, "longest prompt"] = ServingSettings.max_prompt_tokens
    max_new_tokens: Annotated[int, "most tokens that a request may ask for"] = ServingSettings.max_new_tokens
    default_new_tokens: Annotated[int, "answer's cap where a request names none"] = ServingSettings.default_new_tokens
    max_requests: Annotated[int, "requests a replica holds, decoding and waiting; the next one is told 429"] = ServingSettings.max_requests
    max_body_bytes: Annotated[int, "largest body of a request"] = ServingSettings.max_body_bytes
    max_block_size: Annotated[int, "most tokens in flight (block_size x max_blocks) that a request may ask for"] = ServingSettings.max_block_size
    max_chains: Annotated[int, "most drafts and candidates of one forward that a request may ask for"] = ServingSettings.max_chains
    drain_seconds: Annotated[float, "what is in flight at the end may take so long to finish"] = 30.0
    replicas: Annotated[int, "copies of the model, each with its own batch"] = 1
    threads: Annotated[int, "torch threads of a replica"] = 1
    gpus: Annotated[float, "GPUs of a replica"] = 0.0
    address: Annotated[str | None, "Ray address of an existing cluster; none starts a local one"] = None
    trust_remote_code: Annotated[bool, "may the checkpoint bring its own Python code?"] = False

    def __post_init__(self) -> None:
        for name in ("replicas", "threads", "port"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port}")
        if self.gpus < 0 or self.drain_seconds < 0:
            raise ValueError(f"gpus and drain_seconds must not be negative, got {self.gpus} and {self.drain_seconds}")

    def settings(self) -> ServingSettings:
        """Raises UserError for a decoding setting that does not fit, or a key file that cannot be read."""
        given = {"method": self.method and self.method.value, "block_size": self.block_size, "ngram": self.ngram, "auto": self.auto}
        decoding = decoding_for(self.model, given, untrained=PLAIN)
        try:
            DecodingConfig(**decoding)
            return ServingSettings(
                **{name: getattr(self, name) for name in ServingSettings.__dataclass_fields__ if hasattr(self, name) and name != "name"},
                name=self.name or Path(self.model).resolve().name,
                decoding=decoding,
                api_key=_key(self.api_key_file),
            )
        except ValueError as error:
            raise UserError(str(error)) from error


def main(argv: list[str]) -> int:
    """Exit code."""
    return run_tool(argv, ServeArguments, _serve)


def _serve(arguments: ServeArguments) -> int:
    for needed in ("fastapi", "prometheus_client"):
        if importlib.util.find_spec(needed) is None:
            raise UserError(f"serving needs {needed}: pip install 'jacobi-forcing[serve]'")
    from pipelines.checkpoints import load_tokenizer

    settings = arguments.settings()
    tokenizer = load_tokenizer(arguments.model, trust_remote_code=arguments.trust_remote_code)
    _check_free(arguments.host, arguments.port)
    if settings.api_key is None and not _loopback(arguments.host):
        print(f"warning: host={arguments.host} without api_key_file: everybody who reaches this machine may use the model", file=sys.stderr)

    from tasks.serving.deployment import Place, deploy, undeploy

    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # by default 5: a busy machine would start its proxy again and again
    cluster = ClusterConfig(
        address=arguments.address,
        num_cpus=max(4, arguments.replicas * arguments.threads + 2),
        workers=arguments.replicas,
        cpus_per_worker=float(arguments.threads),
        gpus_per_worker=arguments.gpus,
        threads_per_worker=arguments.threads,
    )
    ended = threading.Event()
    start_ray(cluster)
    for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which installs its own, and dies of them
        signal.signal(number, lambda *_: ended.set())
    try:
        try:
            deploy(
                settings,
                Place(arguments.host, arguments.port, arguments.replicas, float(arguments.threads), arguments.gpus, arguments.drain_seconds),
            )
        except RuntimeError as error:
            raise UserError(f"model={arguments.model}: the replicas do not start ({' '.join(str(error).split())[:500]})") from error
        how = f"decoded in parallel, {settings.decoding}" if settings.parallel else "plain AR, one token per forward"
        chat = "" if tokenizer.chat_template else "; no chat template, so /v1/completions only"
        print(f"serving {settings.name} at http://{arguments.host}:{arguments.port}/v1 ({how}{chat})", flush=True)
        ended.wait()
        print(f"ending: what is in flight may take {arguments.drain_seconds:g} seconds to finish", flush=True)
    finally:
        undeploy()
        stop_local_ray(cluster)
    print("ended", flush=True)
    return 0


def _key(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"api_key_file={file}: cannot be read ({error})") from error


def _check_free(host: str, port: int) -> None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserError(f"host={host} port={port}: cannot listen there ({error.strerror}); choose another port") from error


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
