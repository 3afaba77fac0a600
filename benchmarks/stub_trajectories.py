"""A collector without a model: trajectories as a pure function of the prompt's id, of realistic lengths, made with numpy alone.

For benchmarks and fault tests of what surrounds collection. Knows nothing about Ray.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tasks import artifacts, trajectory_files
from tasks.artifacts import Prompt, prompt_id

BLOCK_SIZE, VOCABULARY, EOS = 16, 32_000, 2
TEXT = "Write a function that takes a list of numbers and returns their running mean. " * 60


def stub_trajectory(
    identity: int, prompt_ids: Sequence[int], *, length: int | None = None, block_size: int = BLOCK_SIZE, vocabulary: int = VOCABULARY
) -> trajectory_files.TrajectoryRow:
    """3 to 10 states per block, each with a longer converged prefix than the one before. length: of the answer; by default about 350, up to 1,024."""
    rng, n = np.random.default_rng(identity), block_size
    length = int(np.clip(rng.lognormal(5.7, 0.6), 8, 1024)) if length is None else length
    answer = rng.integers(10, vocabulary, length, dtype=np.int32)
    answer[-1] = EOS
    blocks = -(-length // n)
    shuffled, counts = rng.random((blocks, n)).argsort(1), rng.integers(2, 10, blocks)
    wrong = rng.integers(1, vocabulary - 10, (10, n), dtype=np.int32)
    states = []
    for i in range(blocks):
        fixed = answer[i * n : (i + 1) * n]
        prefixes = np.sort(shuffled[i, : counts[i]])
        prefixes = np.append(prefixes[prefixes < len(fixed)], len(fixed))
        noise = (fixed + wrong[: len(prefixes), : len(fixed)] + i) % vocabulary
        noise = np.where(noise == fixed, (fixed + 1) % vocabulary, noise)  # so that each prefix is as long as meant
        states.append(np.where(np.arange(len(fixed)) < prefixes[:, None], fixed, noise).astype(np.int32))
    return trajectory_files.TrajectoryRow(identity, np.asarray(prompt_ids, np.int32), answer, "eos", n, states)


@dataclass(frozen=True)
class StubCollected:
    trajectories: list[trajectory_files.TrajectoryRow]
    disagreements: int = 0
    dropped: dict[int, str] = field(default_factory=dict)


class StubCollector:
    """What the stage makes once per actor, and then calls with the prompts of a shard."""

    def __init__(self, seconds_per_row: float = 0.0) -> None:
        self.seconds_per_row = seconds_per_row

    def __call__(self, prompts: Sequence[Any]) -> StubCollected:
        time.sleep(self.seconds_per_row * len(prompts))
        return StubCollected([stub_trajectory(p.id, p.input_ids) for p in prompts])


def write_stub_prompts(folder: Path, rows: int) -> None:
    """A `prompts` artifact without a tokenizer: `rows` training prompts of about 180 tokens, up to 1,000."""
    folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_prompts(folder, _prompts(rows))


def _prompts(rows: int) -> Iterator[Prompt]:
    rng = np.random.default_rng(0)
    for i in range(rows):
        length = int(np.clip(rng.lognormal(5.2, 0.6), 20, 1000))
        messages = [{"role": "user", "content": f"{i}: {TEXT[: 4 * length]}"}]
        yield Prompt(prompt_id(messages), "train", messages, rng.integers(10, VOCABULARY, length).tolist(), {"problem_set": "stub"})


def read_digests(output: Path) -> dict[int, str]:
    """Prompt id -> hash of its whole trajectory as read back. Raises ValueError where an id stands twice."""
    found: dict[int, str] = {}
    for part in sorted(output.glob("part-*.parquet")):
        for row in trajectory_files.read_rows(part):
            if row.id in found:
                raise ValueError(f"{part}: prompt id {row.id} stands twice")
            found[row.id] = digest(row)
    return found


def digest(row: Any) -> str:
    found = hashlib.sha256(f"{row.id} {row.stop_reason} {row.block_size}".encode())
    for values in (row.prompt_ids, row.answer_ids, *row.states):
        found.update(f"{np.shape(values)}".encode())
        found.update(np.ascontiguousarray(values, np.int32).tobytes())
    return found.hexdigest()
