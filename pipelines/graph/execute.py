"""Running a plan: what is finished is shown, the rest is computed here or as Ray work, at the same time where the cluster has room (`room`).

Every stage has the same life: claim, prepare, run, commit, and a child run in MLflow around it. Store and tracker are used by this process
only; a stage that runs on Ray has a thread here which waits for it. With one stage after another there is no thread, and no Ray is started.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pipelines.errors import summary, user_error
from pipelines.graph.dag import PlannedStage
from pipelines.graph.room import Room, as_ray_work
from pipelines.graph.timings import StageTime, Timings
from pipelines.store import Damaged, Manifest, Store, git_sha, plain
from pipelines.tracking.tracker import Tracker
from tasks.cluster import nodes, start_ray, start_seconds
from tasks.remote import PATIENCE, PATIENCE_WITH_WORKERS, Ran, StageCall, Stopped, WorkerLost, run_here, run_on_ray
from tasks.stage import ClusterConfig, StageContext

HEADLINES = 4  # metrics shown in a log line: a stage returns its most telling ones first
ATTEMPTS = 4  # of a stage whose process or machine dies

log = logging.getLogger(__name__)


class StageFailed(Exception):
    """failures: stage id -> what it raised, in the order in which they did; more than one with keep_going, or at the same time."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        super().__init__("; ".join(f"stage {stage} failed: {user_error(error) or summary(error)}" for stage, error in failures.items()))
        self.failures = dict(failures)


def execute(
    plan: Sequence[PlannedStage],
    store: Store,
    tracker: Tracker,
    cluster: ClusterConfig,
    *,
    trust_remote_code: bool = False,
    keep_going: bool = False,
    timings: Timings | None = None,
) -> dict[str, Manifest]:
    """Runs what is not finished; stage id -> manifest, in the plan's order. What is finished stays, whatever happens.

    Raises StageFailed. The first failure ends the run: stages that run beside it are stopped as by Ctrl-C (one that can resume keeps its work).
    With keep_going all that does not need the failed stage is run first. The store is asked again just before each stage, since another run
    may have finished it, or removed it, after `plan` looked.
    """
    timings = timings or Timings()
    context = StageContext(cluster=cluster, trust_remote_code=trust_remote_code)
    execution = _Execution(plan, store, tracker, context, keep_going, timings)
    with timings.running():
        return execution.run()


@dataclass
class _Execution:
    plan: Sequence[PlannedStage]
    store: Store
    tracker: Tracker
    context: StageContext
    keep_going: bool
    timings: Timings

    manifests: dict[str, Manifest] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    running: dict[str, PlannedStage] = field(default_factory=dict)  # on Ray
    threads: dict[str, threading.Thread] = field(default_factory=dict)  # that wait for them
    ended: queue.Queue[tuple[PlannedStage, Manifest | BaseException]] = field(default_factory=queue.Queue)
    stop: threading.Event = field(default_factory=threading.Event)
    queueing: set[str] = field(default_factory=set)  # stages that wait for another run which computes the same
    room: Room | None = None  # of the cluster, once Ray runs

    def run(self) -> dict[str, Manifest]:
        self.labels = {p.stage.id: f"[{position}/{len(self.plan)}] {p.stage.id}" for position, p in enumerate(self.plan, start=1)}
        self.waiting = list(self.plan)
        self.on_ray = as_ray_work(self.context.cluster, [p.stage.needs for p in self.plan if not p.cached])
        try:
            while self.waiting or self.running:
                if self.failures and not self.keep_going:
                    break
                following = self._next()
                if following is not None:
                    self.waiting.remove(following)
                    self._start(following)
                elif self.running:
                    self._note(*self.ended.get())
                else:
                    break  # what is left needs a stage that failed
        finally:
            self._stop_running()
        if self.failures:
            if self.waiting:
                log.info("not run: %s", ", ".join(p.stage.id for p in self.waiting))
            raise StageFailed(self.failures) from next(iter(self.failures.values()))
        return {p.stage.id: self.manifests[p.stage.id] for p in self.plan}

    def _next(self) -> PlannedStage | None:
        """The first stage that can be started now; one that must be alone comes after all others."""
        ours = {p.stage.id for p in self.plan}  # what else a stage needs is finished
        taken = {p.fingerprint for p in self.running.values()}
        ready = [
            p
            for p in self.waiting
            if p.fingerprint not in taken and all(source in self.manifests for source in p.stage.inputs.values() if source in ours)
        ]
        if not self.on_ray:
            return ready[0] if ready else None
        for planned in sorted(ready, key=lambda p: p.stage.needs.alone):
            needs = planned.stage.needs
            if not self.running or (not needs.alone and (needs.here or self._fits(planned))):
                return planned
        return None

    def _fits(self, planned: PlannedStage) -> bool:
        limit = self.context.cluster.parallel_stages
        if limit is not None and len(self.running) >= limit:
            return False
        return self.room is not None and self.room.less(p.stage.needs for p in self.running.values()).holds(planned.stage.needs)

    def _start(self, planned: PlannedStage) -> None:
        """Runs it, or has it run by a thread."""
        stage = planned.stage
        try:
            if self.on_ray and not stage.needs.here and not self._is_finished(planned):
                starting = start_seconds()
                room = self._ray()
                if room.holds(stage.needs):
                    self.running[stage.id] = planned
                    arguments = (planned, start_seconds() - starting)
                    thread = threading.Thread(target=self._in_thread, args=arguments, name=stage.id, daemon=True)
                    self.threads[stage.id] = thread
                    thread.start()
                    return
            self.manifests[stage.id] = self._life(planned, run_here)
        except Exception as error:
            self.failures[stage.id] = error

    def _is_finished(self, planned: PlannedStage) -> bool:
        return not planned.forced and self.store.finished(planned.folder) is not None

    def _ray(self) -> Room:
        """Started where it is not running: a stage that was timed may have ended it."""
        start_ray(self.context.cluster)
        machines = nodes()
        self.room = Room(sum(cpus for cpus, _ in machines), sum(gpus for _, gpus in machines), machines)
        return self.room

    def _in_thread(self, planned: PlannedStage, start_up: float) -> None:
        needs = planned.stage.needs
        if needs.spread:  # its workers ask for themselves
            asked = {"cpus": 0, "gpus": 0, "threads": 1, "patience": PATIENCE_WITH_WORKERS}
        else:
            asked = {"cpus": needs.cpus, "gpus": needs.gpus, "threads": max(1, int(needs.cpus)), "patience": PATIENCE}

        def work(call: StageCall) -> Ran:
            return run_on_ray(call, stop=self.stop, label=self.labels[planned.stage.id], **asked)

        try:
            result: Manifest | BaseException = self._life(planned, work, start_up=start_up)
        except BaseException as error:
            result = error
        self.ended.put((planned, result))

    def _note(self, planned: PlannedStage, result: Manifest | BaseException) -> None:
        self.running.pop(planned.stage.id, None)
        if isinstance(result, Manifest):
            self.manifests[planned.stage.id] = result
        elif isinstance(result, Exception):
            self.failures[planned.stage.id] = result
        elif not self.stop.is_set():
            raise result

    def _stop_running(self) -> None:
        """Asks what still runs on Ray to end, and waits for it; threads that wait for another run hold nothing and are left."""
        self.stop.set()
        for stage_id, thread in self.threads.items():
            while thread.is_alive() and stage_id not in self.queueing:
                thread.join(timeout=0.2)
        while not self.ended.empty():
            self._note(*self.ended.get())

    def _life(self, planned: PlannedStage, work: Callable[[StageCall], Ran], *, start_up: float = 0.0) -> Manifest:
        """From the question whether it is finished to the answer that it is."""
        stage, label = planned.stage, self.labels[planned.stage.id]
        took = self.timings.stages[stage.id] = StageTime()
        with took.counted():
            manifest = None if planned.forced else self.store.finished(planned.folder)
            if manifest is None:
                asked = time.monotonic()
                self.queueing.add(stage.id)
                with self.store.claim(planned.fingerprint):
                    self.queueing.discard(stage.id)
                    took.waited = time.monotonic() - asked
                    if self.stop.is_set():
                        raise KeyboardInterrupt
                    manifest = None if planned.forced else self.store.finished(planned.folder) or self.store.salvage(planned.folder)
                    if manifest is None:
                        self._fetch_inputs(planned, took)
                        manifest = self._compute(planned, label, work, took)
            if took.cached:
                log.info("%s: cached%s", label, _headline(manifest.metrics))
                with self.tracker.stage(stage.id, fingerprint=planned.fingerprint, params=manifest.config, cached=True) as run_id:
                    self.tracker.log_metrics(manifest.metrics, run_id=run_id)
                    self.tracker.log_lineage(planned, manifest, run_id=run_id, folder=self.store.address(planned.folder, manifest))
        took.start_up += start_up  # before this life began
        if not took.cached:
            split = f"{took.start_up:.1f} s start-up, {took.ours:.1f} s ours"
            log.info("%s: done in %.1f s, %s%s", label, took.useful + took.start_up + took.ours, split, _headline(manifest.metrics))
        return manifest

    def _fetch_inputs(self, planned: PlannedStage, took: StageTime) -> None:
        """Makes them readable where the stage looks for them; one that turns out to be damaged is computed again first."""
        for folder in dict.fromkeys(planned.inputs.values()):
            try:
                self.store.fetch(folder)
            except Damaged as damaged:
                source = next((p for p in self.plan if p.folder == folder), None)
                if source is None:  # run alone: its inputs are not part of the run
                    raise
                log.warning("%s: %s; computing it again", self.labels[source.stage.id], damaged)
                asked = time.monotonic()
                self._life(source, run_here)
                took.waited += time.monotonic() - asked

    def _compute(self, planned: PlannedStage, label: str, work: Callable[[StageCall], Ran], took: StageTime) -> Manifest:
        stage, config = planned.stage, plain(planned.stage.config)
        took.cached = False
        log.info("%s: running", label)
        started, clock = datetime.now(UTC), time.monotonic()
        with self.tracker.stage(stage.id, fingerprint=planned.fingerprint, params=config, cached=False) as run_id:
            context = StageContext(self.tracker.reporter(run_id), self.context.cluster, self.context.trust_remote_code)
            call = StageCall(stage.run, stage.config, planned.inputs, planned.folder, context)
            try:
                ran = self._attempts(planned, label, call, work)
            except BaseException as error:
                log.error("%s: stopped after %.1f s by %s", label, time.monotonic() - clock, type(error).__name__)
                raise
            took.useful, took.start_up = ran.seconds, took.start_up + ran.start_up
            numbers = {name: value if isinstance(value, int) else float(value) for name, value in ran.metrics.items()}
            seconds = ran.seconds + ran.start_up
            manifest = Manifest(
                stage=stage.id,
                kind=stage.kind,
                version=stage.version,
                fingerprint=planned.fingerprint,
                config=config,
                upstream=planned.upstream,
                external=plain(stage.external),
                metrics=numbers,
                started=started.isoformat(timespec="seconds"),
                seconds=round(seconds, 3),
                mlflow_run_id=run_id,
                git_sha=git_sha(),
                gpus=context.cluster.gpus_per_worker > 0,
            )
            manifest = self.store.commit(planned.folder, manifest)
            self.tracker.log_lineage(planned, manifest, run_id=run_id, folder=self.store.address(planned.folder, manifest))
            ours = time.monotonic() - clock - seconds
            self.tracker.log_metrics({**numbers, "seconds": seconds, "seconds_start_up": took.start_up, "seconds_ours": ours}, run_id=run_id)
        return manifest

    def _attempts(self, planned: PlannedStage, label: str, call: StageCall, work: Callable[[StageCall], Ran]) -> Ran:
        """The stage's work, anew where it was lost with the machine that did it."""
        for attempt in range(1, ATTEMPTS + 1):
            # A forced stage starts from nothing: its old files would make a resumable one believe that it is done.
            self.store.prepare(planned.folder, resume=planned.stage.resumable and (attempt > 1 or not planned.forced))
            try:
                return work(call)
            except Stopped as stopped:
                raise KeyboardInterrupt from stopped
            except WorkerLost as lost:
                if attempt == ATTEMPTS:
                    raise
                log.warning("%s: attempt %d was lost (%s); starting again", label, attempt, lost)
        raise AssertionError("unreachable")


def _headline(metrics: Mapping[str, float]) -> str:
    shown = [f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in list(metrics.items())[:HEADLINES]]
    return f" ({', '.join(shown)})" if shown else ""
