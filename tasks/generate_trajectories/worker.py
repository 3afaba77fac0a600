"""What one worker does with one shard: collect its prompts, quarantine those that fail, write its files. No Ray, no torch here.

A part that exists is whole (written under another name, synced, renamed), so any worker may repeat any shard at any time.
"""

from __future__ import annotations

import faulthandler
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from jacobi_core.trajectories.quality import REASONS
from tasks import artifacts
from tasks.artifacts import Prompt, PromptRows
from tasks.stage import UserError
from tasks.trajectory_files import TrajectoryLike, read_metadata, read_rows, trajectory_part, write_trajectories

ATTEMPT = ".attempt-"  # files: what is being tried, and how often it was before, so that what always kills its worker is noticed
MOST_ATTEMPTS = 4


class Found(Protocol):
    """What a collector makes of some prompts: each has a trajectory, or is dropped under one of quality.REASONS."""

    trajectories: Sequence[TrajectoryLike]
    disagreements: int
    dropped: Mapping[int, str]  # prompt id -> reason


Collector = Callable[[Sequence[Prompt]], Found]


@dataclass(frozen=True)
class ShardJob:
    """All that a worker needs; picklable. make_collector is called once per worker and loads the model."""

    make_collector: Callable[[], Collector]
    prompts: Path  # folder of the prompts stage
    output: Path
    count: int  # prompts in all
    shard_size: int
    attempt_of: str  # names this start of the stage: attempts of earlier ones do not count
    metadata: dict[str, str] = field(default_factory=dict)  # for every part

    @property
    def shards(self) -> int:
        return -(-self.count // self.shard_size)

    def positions(self, shard: int) -> range:
        """Which prompts, in their stored order. The driver needs no more than this: it never reads a prompt."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, self.count))


def quarantine_file(output: Path, shard: int) -> Path:
    return output / f"quarantine-{shard:06d}.json"


def is_finished(output: Path, shard: int) -> bool:
    """Quarantined prompts get another chance whenever the stage is started."""
    return trajectory_part(output, shard).exists() and not quarantine_file(output, shard).exists()


class ShardWorker:
    """Turns shard numbers into files."""

    def __init__(self, job: ShardJob, *, name: str = "worker") -> None:
        """name: the same when a dead worker is started again."""
        faulthandler.enable()
        self.job = job
        with Attempt(job, f"start-{name}", "starting a worker"):
            self.prompts = PromptRows(job.prompts, "train")
            self.collect = job.make_collector()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """batch: {"shard": [number]}. Returns counts of that shard, one row."""
        shard = int(batch["shard"][0])
        with Attempt(self.job, f"shard-{shard:06d}", f"shard {shard} (trajectories.shard_size={self.job.shard_size})"):
            counts = self._run(shard)
        return {name: [value] for name, value in {"shard": shard, **counts}.items()}

    def _run(self, shard: int) -> dict[str, int]:
        part, quarantine = trajectory_part(self.job.output, shard), quarantine_file(self.job.output, shard)
        if is_finished(self.job.output, shard):  # by a worker whose report was lost
            return part_counts(part)
        prompts = self.prompts.read(self.job.positions(shard))
        gathered = _Gathered()
        if part.exists():  # and some of its prompts are in quarantine
            gathered.found = {row.id: row for row in read_rows(part)}
            gathered.dropped = read_dropped(self.job.output, shard)
            gathered.disagreements = part_counts(part)["disagreements"]
        self._collect([p for p in prompts if p.id not in gathered.found and p.id not in gathered.dropped], gathered)
        kept = [gathered.found[p.id] for p in prompts if p.id in gathered.found]
        reasons = Counter(gathered.dropped.values())
        counts = {
            "trajectories": len(kept),
            "quarantined": len(gathered.failures),
            **{f"dropped_{reason}": reasons[reason] for reason in REASONS},
            "answer_tokens": sum(len(t.answer_ids) for t in kept),
            "blocks": sum(len(t.states) for t in kept),
            "forwards": sum(len(states) - 1 for t in kept for states in t.states),
            "ended": sum(t.stop_reason == "eos" for t in kept),
            "disagreements": gathered.disagreements,
        }
        try:
            if gathered.failures:
                artifacts.write_json(quarantine, gathered.failures)
            _write_dropped(self.job.output, shard, gathered.dropped)
            write_trajectories(part, kept, metadata={**self.job.metadata, "counts": json.dumps(counts)})
            if not gathered.failures:
                quarantine.unlink(missing_ok=True)  # of an earlier attempt
        except OSError as error:
            raise cannot_write(part, error) from error
        return counts

    def _collect(self, prompts: Sequence[Prompt], gathered: _Gathered) -> None:
        """All at once; where that fails in halves, so that one bad row costs one row."""
        if not prompts:
            return
        try:
            result = self.collect(prompts)
        except Exception as error:
            if len(prompts) > 1:
                half = len(prompts) // 2
                self._collect(prompts[:half], gathered)
                self._collect(prompts[half:], gathered)
            else:
                gathered.failures.append({"id": prompts[0].id, "error": f"{type(error).__name__}: {error}"})
            return
        gathered.found |= {t.id: t for t in result.trajectories}
        gathered.dropped |= result.dropped
        gathered.disagreements += result.disagreements


@dataclass
class _Gathered:
    """What has become of a shard's prompts, by id."""

    found: dict[int, TrajectoryLike] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)  # why: one of quality.REASONS
    failures: list[dict[str, Any]] = field(default_factory=list)
    disagreements: int = 0


def _dropped_file(output: Path, shard: int) -> Path:
    return output / f"dropped-{shard:06d}.json"


def _write_dropped(output: Path, shard: int, dropped: dict[int, str]) -> None:
    if dropped:
        artifacts.write_json(_dropped_file(output, shard), [{"id": identity, "reason": reason} for identity, reason in sorted(dropped.items())])
    else:
        _dropped_file(output, shard).unlink(missing_ok=True)  # of an attempt that ended before its part was written


def read_dropped(output: Path, shard: int) -> dict[int, str]:
    """Prompt id -> reason, of a shard whose part is there."""
    path = _dropped_file(output, shard)
    return {entry["id"]: entry["reason"] for entry in artifacts.read_json(path)} if path.exists() else {}


def part_counts(part: Path) -> dict[str, int]:
    """What the worker counted when it wrote this part; reads its footer only."""
    return json.loads(read_metadata(part)["counts"])


def cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror or error}); make room or choose another paths.store, and start again: it resumes")


class Attempt:
    """Something that may end this process. Raises UserError when it has done so MOST_ATTEMPTS - 1 times since the stage was started."""

    def __init__(self, job: ShardJob, name: str, what: str) -> None:
        self.path, self.job, self.what = job.output / f"{ATTEMPT}{name}", job, what

    def __enter__(self) -> None:
        try:
            run, count = self.path.read_text().split()
        except (OSError, ValueError):
            run, count = "", "0"
        tried = int(count) + 1 if run == self.job.attempt_of else 1
        if tried >= MOST_ATTEMPTS:
            raise UserError(
                f"trajectories: {self.what} ended its process {tried - 1} times (out of memory? a crash inside a library? the workers' output "
                "above tells); lower trajectories.batch_size or cluster.workers, or look at these prompts"
            )
        try:
            self.path.write_text(f"{self.job.attempt_of} {tried}")
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
