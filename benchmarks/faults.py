"""The small full pipeline on a Ray cluster of three nodes, under a seeded adversary: is every result the undisturbed one?

    python -m benchmarks.faults --folder DIR [--rounds 20] [--seed 0] [--faults worker,node,driver,tracking,disk] [--json]

Every round is a fresh cluster, store and tracking server, and two faults at random moments:

worker    SIGKILL to a process of Ray that holds a task or an actor; the run itself has to replace it
node      SIGKILL to a whole node; another one joins ten seconds later
driver    SIGKILL to the driver; started again at once
tracking  SIGKILL to the MLflow server; back after 10 to 25 seconds
disk      the store's disk (64 MB) is full for 20 seconds

A driver that ends with an error is started again with the same command, as its user would, up to five times, after 2, 4, 8, 16 and 32 seconds:
one that meets the outage at its start refuses within seconds. Each round appends a line to DIR/rounds.jsonl and a benchmark started again goes
on after the last one. Prints a list of {"name", "model", "value"}:

rounds_equal_share    rounds whose every stage has rows, weights and results of the undisturbed run, and no other
lost_rows, doubled_rows   trajectories
orphans               processes of a round that outlived it: actors and tasks in the living cluster a minute after its last driver, then all
                      that is there a minute after the cluster itself
ray_actors_left       no orphans: the most actors of Ray's own in one living cluster that are named, one per cluster, and taken over by the
                      next driver (fault_cluster.ONE_PER_CLUSTER); any driver leaves them, killed or not, and a second of a kind is an orphan
zombie_runs           MLflow runs left RUNNING, and stages that the last pipeline run does not show FINISHED
reruns                how often a driver had to be started again, one start per killed driver not counted
faults_KIND           how many struck
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fault_cluster import MARKER, QUIET, ROOT, Driver, Nodes, SmallDisk, TrackingServer, of_round, sorted_out, unmount, workers
from benchmarks.fault_digests import digests, lost_and_doubled, trajectory_ids
from benchmarks.trajectory_faults import title
from tasks.artifacts import read_json, write_json

FAULTS = ("worker", "node", "driver", "tracking", "disk")
PER_ROUND = 2
RERUNS = 5
GRACE = 60.0  # seconds that processes have to end after their round; on a busy machine the dashboard's last one took over 30
LIMIT = 1200.0  # seconds of one round, after which it hangs
PIPELINE = (
    *("experiment=smoke", "cluster.workers=2", "evaluate.methods=[jacobi]", "evaluate.block_sizes=[16]", "evaluate.batch_sizes=[1]"),
    *("evaluate.references=[]", "distill.probe.every=0"),
)


@dataclass
class Round:
    """What was done in one round and what was found after it."""

    round: int
    seed: int
    faults: list[dict[str, Any]] = field(default_factory=list)  # kind, planned and real moment in seconds, what was hit
    exits: list[int] = field(default_factory=list)  # of every driver, killed ones -9
    errors: list[str] = field(default_factory=list)  # what drivers that failed said
    seconds: float = 0.0
    equal: bool = False
    differing: list[str] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    orphans: list[str] = field(default_factory=list)
    ray_actors_left: list[str] = field(default_factory=list)
    zombie_runs: int = 0


class Drill:
    """One round: `run` it under faults planned before."""

    def __init__(self, folder: Path, number: int, seed: int, *, small_disk: bool) -> None:
        self.folder, self.found = folder, Round(number, seed)
        unmount(folder / "disk")
        shutil.rmtree(folder, ignore_errors=True)
        self.rng = random.Random(f"{seed} {number}")
        self.mark = f"{os.getpid()} {seed} {number}"
        os.environ[MARKER] = self.mark  # nodes, server and drivers inherit it
        self.disk = SmallDisk(folder / "disk") if small_disk else None
        self.store = (self.disk.folder if self.disk else folder) / "store"
        self.nodes, self.server = Nodes(), TrackingServer(folder)
        self.server.start()
        self.due: list[tuple[float, str]] = []  # (seconds, what to mend)
        self.driver_restarts = 0

    def run(self, planned: list[tuple[float, str]]) -> Round:
        """planned: (seconds after the start, kind), in order. Starts drivers until one is done, then looks."""
        started, planned = time.monotonic(), list(planned)
        driver = self._drive()
        while True:
            now = time.monotonic() - started
            self._mend_due(now)
            if planned and planned[0][0] <= now and self._strike(planned[0][1], driver, planned[0][0], now):
                planned.pop(0)
            code = driver.code()
            if code is None and now < LIMIT:
                time.sleep(0.2)
                continue
            self.found.exits.append(-1 if code is None else code)
            if code == 0 or code is None or len(self.found.errors) > RERUNS:
                break
            if code != -9:
                self.found.errors.append(driver.last_words())
                again = now + 2.0 ** len(self.found.errors)
                while (now := time.monotonic() - started) < again:
                    self._mend_due(now)
                    time.sleep(0.2)
            driver = self._drive()
        driver.kill()
        self.found.faults += [{"kind": kind, "planned": round(moment, 1), "hit": "nothing: the run was over"} for moment, kind in planned]
        self.found.seconds = round(time.monotonic() - started, 1)
        for _, what in self.due:
            self._mend(what)
        return self.found

    def look(self, expected: dict[str, Any]) -> None:
        """Compares with the undisturbed run; expected as in undisturbed.json."""
        found = digests(self.store)
        names = found.keys() | expected["digests"].keys()
        self.found.differing = sorted(name for name in names if found.get(name) != expected["digests"].get(name))
        self.found.equal = self.found.exits[-1] == 0 and not self.found.differing
        self.found.lost, self.found.doubled = lost_and_doubled(trajectory_ids(self.store), expected["ids"])
        self.found.zombie_runs = self._zombies(len(expected["digests"]))

    def close(self) -> None:
        """Ends what belongs to the round, then counts what is still there."""
        until = time.monotonic() + GRACE
        while (found := sorted_out(filter(None, map(title, workers(self.mark)))))[0] and time.monotonic() < until:
            time.sleep(1.0)
        self.found.orphans, self.found.ray_actors_left = found  # of a job that is over
        self.server.kill()
        self.nodes.stop()
        until = time.monotonic() + GRACE
        while (left := list(of_round(self.mark))) and time.monotonic() < until:
            time.sleep(1.0)
        self.found.orphans += [" ".join(p.cmdline())[:120] for p in left]
        for process in left:
            process.kill()
        if self.disk:
            self.disk.remove()

    def _drive(self) -> Driver:
        places = [f"paths.outputs={self.folder / 'outputs'}", f"paths.store={self.store}", f"paths.tracking_uri={self.server.uri}"]
        command = [sys.executable, "-m", "pipelines.full_run", *PIPELINE, f"cluster.address={self.nodes.address}", *places]
        return Driver(command, self.folder / "driver.log")

    def _strike(self, kind: str, driver: Driver, planned: float, now: float) -> bool:
        """Whether the fault struck; a worker is waited for."""
        hit = kind
        if kind == "worker":
            running = workers(self.mark)
            if not running:
                return False
            victim = self.rng.choice(running)
            hit = "".join(victim.cmdline()[:1])
            victim.kill()
        elif kind == "node":
            self.nodes.kill_one(self.rng)
            self.due.append((now + 10.0, kind))
        elif kind == "driver":
            driver.kill()
        elif kind == "tracking":
            self.server.kill()
            self.due.append((now + self.rng.uniform(10.0, 25.0), kind))
        else:
            assert self.disk is not None
            self.disk.fill()
            self.due.append((now + 20.0, kind))
        self.due.sort()
        self.found.faults.append({"kind": kind, "planned": round(planned, 1), "at": round(now, 1), "hit": hit})
        return True

    def _mend_due(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            self._mend(self.due.pop(0)[1])

    def _mend(self, kind: str) -> None:
        if kind == "node":
            self.nodes.add_one()
        elif kind == "tracking":
            self.server.start(wait=False)
        elif self.disk:
            self.disk.empty()

    def _zombies(self, stages: int) -> int:
        from mlflow import MlflowClient

        self.server.kill()
        self.server.start()
        client = MlflowClient(self.server.uri)
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments, max_results=1000)  # newest first
        pipeline = next(run for run in runs if run.data.tags.get("kind") == "pipeline")
        children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == pipeline.info.run_id]
        finished = {run.data.tags["stage"] for run in children if run.info.status == "FINISHED"}
        return sum(run.info.status == "RUNNING" for run in runs) + (stages - len(finished)) + (pipeline.info.status != "FINISHED")


def plan(number: int, seed: int, kinds: list[str], seconds: float) -> list[tuple[float, str]]:
    """(seconds, kind) in order: kinds are dealt from shuffled decks, so that all are as frequent, moments drawn over an undisturbed run's time."""
    deck = random.Random(f"deck {seed}")
    dealt: list[str] = []
    while len(dealt) < PER_ROUND * (number + 1):
        dealt += deck.sample(kinds, len(kinds))
    moments = random.Random(f"moments {seed} {number}")
    return sorted((moments.uniform(0.0, seconds), kind) for kind in dealt[PER_ROUND * number : PER_ROUND * (number + 1)])


def undisturbed(folder: Path, seed: int, *, small_disk: bool) -> dict[str, Any]:
    """Seconds, digests and trajectory ids of a run that nobody disturbs; made once. Raises SystemExit where it fails."""
    file = folder / "undisturbed.json"
    if not file.exists():
        drill = Drill(folder / "undisturbed", -1, seed, small_disk=small_disk)
        try:
            found = drill.run([])
            if found.exits != [0]:
                raise SystemExit(f"the undisturbed run ended with {found.exits}: see {drill.folder / 'driver.log'}")
            facts = {"seconds": found.seconds, "digests": digests(drill.store), "ids": trajectory_ids(drill.store)}
        finally:
            drill.close()
        write_json(file, facts)
    return read_json(file)


def faults(folder: Path, *, rounds: int, seed: int, kinds: list[str]) -> list[Round]:
    """The first `rounds` rounds of this seed: those on file, and those run now."""
    folder.mkdir(parents=True, exist_ok=True)
    expected = undisturbed(folder, seed, small_disk="disk" in kinds)
    log = folder / "rounds.jsonl"
    done = [Round(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
    for number in sorted(set(range(rounds)) - {entry.round for entry in done if entry.seed == seed}):
        drill = Drill(folder / f"round-{number}", number, seed, small_disk="disk" in kinds)
        try:
            entry = drill.run(plan(number, seed, kinds, expected["seconds"]))
            drill.look(expected)
        finally:
            drill.close()
        with log.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
        print(json.dumps(asdict(entry)), file=sys.stderr, flush=True)
        done.append(entry)
    return [entry for entry in done if entry.seed == seed and entry.round < rounds]


def report(found: list[Round]) -> dict[str, float]:
    struck = Counter(fault["kind"] for entry in found for fault in entry.faults if "at" in fault)
    return {
        "rounds": len(found),
        "rounds_equal_share": sum(entry.equal for entry in found) / len(found),
        "lost_rows": sum(entry.lost for entry in found),
        "doubled_rows": sum(entry.doubled for entry in found),
        "orphans": sum(len(entry.orphans) for entry in found),
        "ray_actors_left": max(len(entry.ray_actors_left) for entry in found),
        "zombie_runs": sum(entry.zombie_runs for entry in found),
        "reruns": sum(len(entry.errors) for entry in found),
        "round_s": statistics.median(entry.seconds for entry in found),
        **{f"faults_{kind}": struck[kind] for kind in FAULTS},
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "faults", help="where everything is written, and resumed from")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS), help="which kinds, separated by commas")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    kinds = arguments.faults.split(",")
    if arguments.rounds < 1 or not set(kinds) <= set(FAULTS):
        parser.error(f"--rounds must be at least 1 and --faults among {','.join(FAULTS)}")
    os.environ.update(QUIET)
    values = report(faults(arguments.folder.resolve(), rounds=arguments.rounds, seed=arguments.seed, kinds=kinds))
    rows = [{"name": name, "model": "smoke", "value": round(value, 3)} for name, value in values.items()]
    print(json.dumps(rows, indent=1) if arguments.json else "\n".join(f"{row['name']:<20} {row['value']:,}" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
