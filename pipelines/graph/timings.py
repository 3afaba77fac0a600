"""Where a run's time went: the stages' own work, starting Ray and its workers, and ours (store, MLflow, hashing, start-up of this program).

Ours is whatever is left of the wall time, so nothing can hide: MLflow calls made inside a worker are the only ones that count as the stage's work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tasks.artifacts import write_json

TIMINGS = "timings.json"
SCHEMA_VERSION = 1


@dataclass
class StageTime:
    """Seconds of one stage."""

    cached: bool = True
    useful: float = 0.0
    start_up: float = 0.0  # of Ray, of the process the stage ran in, and until it was placed
    waited: float = 0.0  # for another run that computed the same stage, or for a damaged input to be computed again
    ours: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around all that is done for the stage; what the other fields do not name is ours."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.ours = max(0.0, time.monotonic() - began - self.useful - self.start_up - self.waited)


@dataclass
class Timings:
    """Of one run; stages in the order in which they ended."""

    began: float = field(default_factory=time.monotonic)
    stages: dict[str, StageTime] = field(default_factory=dict)
    outside: float = 0.0  # ours before the first stage and after the last
    _left: float | None = None

    @classmethod
    def since_process_start(cls) -> Timings:
        """Imports and reading the config count too."""
        return cls(time.monotonic() - (time.time() - psutil.Process().create_time()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the execution of all stages."""
        entered = time.monotonic()
        self.outside = entered - self.began
        try:
            yield
        finally:
            self._left = time.monotonic()

    def record(self) -> dict[str, Any]:
        now = time.monotonic()
        wall = now - self.began
        outside = self.outside + (now - self._left if self._left else 0.0)
        total = {name: sum(getattr(s, name) for s in self.stages.values()) for name in ("useful", "start_up", "waited", "ours")}
        total["ours"] += outside
        share = total["ours"] / max(sum(total.values()), 1e-9)  # of the work, which is more than the wall time where stages ran side by side
        run = {"seconds": wall, **total, "ours_outside_stages": outside, "ours_share": share}
        return {"schema_version": SCHEMA_VERSION, "run": run, "stages": {stage: asdict(t) for stage, t in self.stages.items()}}

    def write(self, path: Path) -> None:
        write_json(path, self.record())

    def table(self) -> str:
        """Computed stages one by one, cached ones together; empty where nothing was recorded."""
        record = self.record()
        run = record["run"]
        computed = {stage: t for stage, t in self.stages.items() if not t.cached}
        cached = [t for t in self.stages.values() if t.cached]
        rows = [(stage, t.useful, t.start_up, t.ours) for stage, t in computed.items()]
        if cached:
            rows.append((f"{len(cached)} cached", 0.0, 0.0, sum(t.ours for t in cached)))
        rows.append(("start and end", 0.0, 0.0, run["ours_outside_stages"]))
        rows.append(("all", run["useful"], run["start_up"], run["ours"]))
        width = max(len(row[0]) for row in rows)
        lines = [f"{'seconds':<{width}} {'useful':>9} {'start-up':>9} {'ours':>9}"]
        lines += [f"{name:<{width}} {useful:>9.1f} {start:>9.1f} {ours:>9.1f}" for name, useful, start, ours in rows]
        return "\n".join([*lines, f"ours (store, MLflow, hashing, this program's start): {100 * run['ours_share']:.1f} %"])
