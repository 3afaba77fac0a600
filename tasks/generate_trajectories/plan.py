"""The shards on Ray Data: one row per shard, an actor pool that makes files of them, and a driver that watches.

Ray Data has job-level checkpointing (2.60: `DataContext.checkpoint_config`, for plans of the form read -> map -> write), but its durable
unit is an output block it names itself, and resuming re-reads and filters all ids through actors of its own (measured: a minute, and a hang
under 2 CPUs). Fixed shards whose files appear whole do the same with no state to lose: what exists is done, and a shard that is collected
twice, by a retry or by the workers of a driver that was killed, gives the same file again.
"""

from __future__ import annotations

import logging
import math
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jacobi_core.trajectories.quality import REASONS
from tasks.generate_trajectories.worker import ShardJob, ShardWorker
from tasks.stage import StageContext, UserError
from tasks.stage_gauges import StageGauges

log = logging.getLogger(__name__)

REPORT_SECONDS = 5.0


class _Actor(ShardWorker):
    """A ShardWorker under the name Ray gives it, which outlives its process."""

    def __init__(self, job: ShardJob) -> None:
        import ray

        super().__init__(job, name=ray.get_runtime_context().get_actor_id())


def run_shards(job: ShardJob, todo: Sequence[int], context: StageContext, *, stall_timeout: float, max_bad: float) -> None:
    """Collects these shards on the cluster. Raises UserError for what a user can mend: see the module and `_watched`."""
    from tasks.cluster import start_ray

    start_ray(context.cluster)
    import ray

    cluster = context.cluster
    workers = min(cluster.workers, len(todo))
    pool = ray.data.ActorPoolStrategy(min_size=min(cluster.min_workers or workers, workers), max_size=workers, max_tasks_in_flight_per_actor=2)
    rows = ray.data.from_items([{"shard": i} for i in todo], override_num_blocks=len(todo)).map_batches(
        _Actor,
        fn_constructor_kwargs={"job": job},
        compute=pool,
        batch_size=1,
        num_cpus=cluster.cpus_per_worker,
        num_gpus=cluster.gpus_per_worker,
    )
    progress = Progress(job, len(todo), context)
    for row in _watched(rows, stall_timeout):
        progress.add(row)
        if progress.bad > max_bad:
            log.error("trajectories: more prompts failed than trajectories.max_bad_share allows; stopping")
            break


class Progress:
    """One line and one set of metrics every few seconds. Rates count from the first shard on, when all workers are at work."""

    def __init__(self, job: ShardJob, shards: int, context: StageContext) -> None:
        self.job, self.shards, self.context = job, shards, context
        self.done = self.rows = self.tokens = self.forwards = self.bad = self.dropped = 0
        self.gauges = StageGauges("trajectories")
        self.first: tuple[float, int, int] | None = None  # when the first shard was done, and its tokens
        self.last = -math.inf

    def add(self, row: dict[str, int]) -> None:
        now = time.monotonic()
        self.done += 1
        self.rows += row["trajectories"]
        self.tokens += row["answer_tokens"]
        self.forwards += row["forwards"]
        self.bad += row["quarantined"]
        self.dropped += sum(row[f"dropped_{reason}"] for reason in REASONS)
        if self.first is None:
            self.first = (now, self.tokens, self.done)
            self.last = now
        elif now - self.last >= REPORT_SECONDS or self.done == self.shards:
            self.last = now
            self._report(now)

    def _report(self, now: float) -> None:
        started, tokens, shards = self.first
        seconds = max(now - started, 1e-9)
        rate = (self.tokens - tokens) / seconds
        eta = (self.shards - self.done) * seconds / (self.done - shards)
        acceptance = self.tokens / max(self.forwards, 1)
        log.info(
            "trajectories: %d/%d shards, %d rows, %.0f answer tokens/s, %.2f tokens per forward, %d dropped, %d quarantined, %.0f s left",
            *(self.done, self.shards, self.rows, rate, acceptance, self.dropped, self.bad, eta),
        )
        metrics = {"rows": self.rows, "answer_tokens_per_s": rate, "tokens_per_forward": acceptance, "seconds_left": eta}
        metrics |= {"dropped": self.dropped, "quarantined": self.bad}
        self.context.report({f"trajectories/{name}": value for name, value in metrics.items()}, self.done)
        self.gauges.set(stage_progress=self.done / self.shards, trajectory_tokens_per_second=rate, trajectory_quarantined=self.bad)


def _watched(dataset: Any, stall_timeout: float) -> Iterator[dict[str, int]]:
    """The dataset's rows as they come. Raises UserError when none comes for stall_timeout seconds, and a worker's UserError as it is.

    Ray Data waits for ever on a cluster that can run nothing more, so its rows are read by a thread.
    """
    import ray

    from tasks.cluster import leave_ray

    rows: queue.Queue[Any] = queue.Queue(maxsize=1000)
    stop, end = threading.Event(), object()

    def read() -> None:
        try:
            for row in dataset.iter_rows():
                rows.put(row)
                if stop.is_set():
                    return  # closes the iterator, which ends the execution
            rows.put(end)
        except BaseException as error:
            rows.put(error)

    reader = threading.Thread(target=read, name="trajectories", daemon=True)
    reader.start()
    heard, told = time.monotonic(), False
    try:
        while True:
            try:
                row = rows.get(timeout=min(1.0, stall_timeout / 4))
            except queue.Empty:
                silent = time.monotonic() - heard
                if silent > stall_timeout:
                    raise UserError(
                        f"trajectories: no shard was finished in {silent:.0f} s (trajectories.stall_timeout={stall_timeout:g}); the cluster has "
                        f"{_resources(ray.available_resources())} free of {_resources(ray.cluster_resources())}. Start again: it resumes"
                    ) from None
                if silent > stall_timeout / 2 and not told:
                    told = True
                    log.warning("trajectories: no shard was finished in the last %.0f s; is a worker stuck, or the cluster full?", silent)
                continue
            if row is end:
                return
            if isinstance(row, BaseException):
                raise _user_error(row) or row
            heard, told = time.monotonic(), False
            yield row
    finally:
        stop.set()
        reader.join(timeout=5)
        if reader.is_alive():  # in the middle of a shard that nobody wants, or stuck: only the end of the session ends it
            for name in ("ray", "ray.data"):  # they would ask the user to report that as a bug
                logging.getLogger(name).setLevel(logging.CRITICAL)
            leave_ray()


def _resources(found: dict[str, float]) -> str:
    return ", ".join(f"{found.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in found) or "nothing"


def _user_error(error: BaseException) -> UserError | None:
    """The UserError that a worker raised; Ray passes on no more of it than its text, in a traceback."""
    found = re.findall(r"\bUserError: (.+)", str(error))
    return UserError(found[-1]) if found else None
