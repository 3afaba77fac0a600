"""What a server is told: the model, and the limits within which requests may ask for something. Plain values; a replica gets them as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.export_model import PROVENANCE
from tasks.stage import UserError, check_dtype

# the knobs of the decoder that a request may turn; they change how many forwards an answer takes, never the answer
KNOBS = ("method", "block_size", "max_blocks", "spawn_ratio", "verification_size", "pool_size", "ngram", "drafts", "auto")
PLAIN = {"method": "ar", "block_size": 1}


@dataclass
class ServingSettings:
    """One replica's. `decoding`: the knobs where a request leaves them out."""

    model: str
    name: str
    dtype: str = "float32"
    trust_remote_code: bool = False
    decoding: dict[str, Any] = field(default_factory=lambda: dict(PLAIN))
    rows: int = 32  # texts decoded together
    kv_megabytes: int = 1024  # memory for their keys and values; who does not fit waits
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 2048  # most that one request may ask for
    default_new_tokens: int = 256  # where it asks for nothing
    max_requests: int = 256  # decoding and waiting together; the next one is told to come back
    max_body_bytes: int = 1_000_000
    max_block_size: int = 128
    max_chains: int = 8  # drafts and candidates of one forward
    stall_seconds: float = 120.0  # an engine that has not finished a forward for so long is dead
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_dtype("dtype", self.dtype)
        whole = ("rows", "kv_megabytes", "max_prompt_tokens", "max_new_tokens", "default_new_tokens", "max_requests", "max_block_size", "max_chains")
        for name in whole:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_body_bytes < 1000:
            raise ValueError(f"max_body_bytes must be at least 1000, got {self.max_body_bytes}")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; leave it out to serve without one")

    @property
    def parallel(self) -> bool:
        return self.decoding["method"] != "ar"


def decoding_of(folder: str) -> dict[str, Any]:
    """How a checkpoint asks to be decoded: as its search found best, else in blocks of the size it was trained for, adaptively; a checkpoint
    that was not trained for parallel decoding one token at a time."""
    file = Path(folder, PROVENANCE)
    if not file.is_file():
        return dict(PLAIN)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"model={folder}: {PROVENANCE} is no JSON ({error}); export the checkpoint again") from error
    if carried := found.get("decoding"):
        return {name: value for name, value in carried.items() if name in KNOBS}
    if not found.get("block_size"):  # a base model: it has a history too, but was never trained on blocks
        return dict(PLAIN)
    return {"method": "running_window", "block_size": found["block_size"], "ngram": True, "auto": True}


def decoding_for(folder: str, given: Mapping[str, Any], *, untrained: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs: what is given, over what the checkpoint asks for. Of a checkpoint that asks for another method only the block size counts.

    given: None means as the checkpoint says. untrained: for one that was not trained for parallel decoding.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("method") == "ar":
        return PLAIN | given
    carried = decoding_of(folder)
    if carried == PLAIN:
        carried = dict(untrained)
    if given.get("method", carried["method"]) != carried["method"]:
        carried = {"block_size": carried["block_size"]} if carried["method"] != "ar" else {}
    return carried | given
