"""The trajectories stage under load and under SIGKILL: the real stage and the real Ray Data plan around a collector without a model.

    python -m benchmarks.trajectory_faults soak  --folder DIR [--rows 450000] [--workers 2] [--json]
    python -m benchmarks.trajectory_faults kills --folder DIR [--driver 20] [--workers-killed 20] [--json]

soak: one run, its driver killed when half of the parts are there, then started again. Prints a list of {"name", "model", "value"}:

soak_rows_per_s        prompts / seconds of both runs, Ray's starts included
soak_driver_mb         largest resident memory of the driver
soak_driver_growth_mb  the second driver's: the most in the last half of its samples minus after a quarter of its parts
soak_files, soak_file_mb_mean, soak_file_mb_max, soak_bytes_per_token
soak_lost_rows, soak_doubled_rows

kills: a fresh run per kill at a random moment (seeded), whose trajectories are then compared, whole, with those of an undisturbed run.
A killed driver is started again; a killed worker must be replaced by the run itself. Every kill appends a line to DIR/kills.jsonl, and a
script started again goes on after the last one. Prints driver_kills_exact and worker_kills_exact, out of driver_kills and worker_kills.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from benchmarks.stub_trajectories import BLOCK_SIZE, StubCollector, read_digests, write_stub_prompts
from tasks.artifacts import PromptRows, read_json, write_json

KILL_ROWS, KILL_SHARD, KILL_SECONDS_PER_ROW = 400, 20, 0.05  # 20 shards of a second each
POLL = 0.2  # seconds
ROOT = Path(__file__).resolve().parents[1]


class Driver:
    """A process that runs the stage; its memory is sampled while it is waited for."""

    def __init__(self, folder: Path) -> None:
        self.output, self.samples = folder / "trajectories", []
        self._log = (folder / "driver.log").open("ab")
        self.started = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.trajectory_faults", "drive", "--folder", str(folder)]
        self.process = psutil.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, cwd=ROOT)

    def wait(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """Its exit code, or None as soon as `until` holds. samples gains (parts, resident MB)."""
        while True:
            if (code := self.process.poll()) is not None:
                return code
            if until():
                return None
            try:
                self.samples.append((self.parts(), self.process.memory_info().rss / 1e6))
            except psutil.Error:  # it ended in between
                continue
            time.sleep(POLL)

    def parts(self) -> int:
        return sum(1 for _ in self.output.glob("part-*.parquet"))

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def workers(self) -> list[psutil.Process]:
        """The processes of the stage's actors, as Ray calls them once they have started."""
        return [process for process in self.descendants() if title(process).startswith("ray::MapWorker")]

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to the driver alone. Returns what it had started: its workers finish the shard they are at, Ray's agents stay for minutes."""
        left = self.descendants()
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait()
        return left

    def descendants(self) -> list[psutil.Process]:
        try:
            return self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def title(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.Error:  # gone
        return ""


def reap(processes: list[psutil.Process]) -> None:
    """Ends what a killed driver has left behind."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil tells a process from another one with its number
            process.kill()


def drive(folder: Path) -> None:
    """The stage, in this process, as folder/drive.json says."""
    from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
    from tasks.generate_trajectories.stage import run
    from tasks.stage import ClusterConfig, StageContext

    settings = read_json(folder / "drive.json")
    config = GenerateTrajectoriesConfig(block_size=BLOCK_SIZE, max_new_tokens=1024, shard_size=settings["shard_size"])
    inputs = {"prompts": Path(settings["prompts"]), "model": folder}
    context = StageContext(cluster=ClusterConfig(workers=settings["workers"], num_cpus=settings["workers"] + 2))
    collector = partial(StubCollector, settings["seconds_per_row"])
    write_json(folder / "metrics.json", run(config, inputs, folder / "trajectories", context, make_collector=collector))


def prepare(folder: Path, *, prompts: Path, **settings: Any) -> None:
    """A folder in which a driver starts from nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "trajectories").mkdir(parents=True)
    write_json(folder / "drive.json", {"prompts": str(prompts), **settings})


# ---- soak


def soak(folder: Path, *, rows: int, workers: int, shard_size: int) -> dict[str, float]:
    prompts, run_folder = folder / f"prompts-{rows}", folder / "soak"
    if not (prompts / "prompts.parquet").exists():
        write_stub_prompts(prompts, rows)
    prepare(run_folder, prompts=prompts, workers=workers, shard_size=shard_size, seconds_per_row=0.0)
    shards = -(-rows // shard_size)
    first = Driver(run_folder)
    if first.wait(until=lambda: first.parts() >= shards // 2) is not None:
        raise SystemExit(f"the first driver ended by itself: see {run_folder / 'driver.log'}")
    seconds = first.seconds()
    left = first.kill()
    kept = {part.name: part.stat().st_mtime_ns for part in first.output.glob("part-*.parquet")}
    second = Driver(run_folder)
    if (code := second.wait()) != 0:
        raise SystemExit(f"the second driver ended with {code}: see {run_folder / 'driver.log'}")
    seconds += second.seconds()
    reap(left)
    parts = sorted(second.output.glob("part-*.parquet"))
    ids = [identity for part in parts for identity in pq.read_table(part, columns=["id"])["id"].to_pylist()]
    redone = sum((second.output / name).stat().st_mtime_ns != stamp for name, stamp in kept.items())
    if redone:
        raise SystemExit(f"{redone} of the {len(kept)} parts of the first run were written again")
    sizes = [part.stat().st_size / 1e6 for part in parts]
    later = [megabytes for count, megabytes in second.samples if count >= len(kept) + (shards - len(kept)) / 4]
    return {
        "soak_rows_per_s": rows / seconds,
        "soak_driver_mb": max(megabytes for _, megabytes in first.samples + second.samples),
        "soak_driver_growth_mb": max(later[len(later) // 2 :]) - later[0] if later else 0.0,  # the last sample may be of its end
        "soak_files": len(parts),
        "soak_file_mb_mean": sum(sizes) / len(sizes),
        "soak_file_mb_max": max(sizes),
        "soak_bytes_per_token": read_json(run_folder / "metrics.json")["bytes_per_answer_token"],
        "soak_lost_rows": len(set(PromptRows(prompts, "train").ids.tolist()) - set(ids)),
        "soak_doubled_rows": len(ids) - len(set(ids)),
    }


# ---- kills


def kills(folder: Path, *, driver: int, worker: int, rows: int = KILL_ROWS) -> dict[str, float]:
    """Exact runs and kills, by kind. Raises SystemExit where the undisturbed run fails."""
    folder.mkdir(parents=True, exist_ok=True)
    reference, seconds = _reference(folder, rows)
    log = folder / "kills.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for kind, count in (("driver", driver), ("worker", worker)):
        for trial in range(count):
            if not any((entry["kind"], entry["trial"]) == (kind, trial) for entry in done):
                entry = _kill_once(folder, kind, trial, reference, seconds)
                print(json.dumps(entry), file=sys.stderr, flush=True)
                with log.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
                done.append(entry)
    wanted = [entry for entry in done if entry["trial"] < {"driver": driver, "worker": worker}[entry["kind"]]]
    found: dict[str, float] = {}
    for kind in ("driver", "worker"):
        found[f"{kind}_kills_exact"] = sum(entry["exact"] for entry in wanted if entry["kind"] == kind)
        found[f"{kind}_kills"] = sum(entry["kind"] == kind for entry in wanted)
    return found


def _reference(folder: Path, rows: int) -> tuple[dict[int, str], float]:
    """Digests and seconds of an undisturbed run."""
    run_folder, file = folder / "undisturbed", folder / "undisturbed.json"
    if not file.exists():
        write_stub_prompts(folder / "prompts", rows)
        prepare(run_folder, **_kill_settings(folder))
        undisturbed = Driver(run_folder)
        if (code := undisturbed.wait()) != 0:
            raise SystemExit(f"the undisturbed run ended with {code}: see {run_folder / 'driver.log'}")
        digests = read_digests(undisturbed.output)
        if set(digests) != set(PromptRows(folder / "prompts", "train").ids.tolist()):
            raise SystemExit(f"the undisturbed run did not collect every prompt: see {run_folder}")
        write_json(file, {"seconds": undisturbed.seconds(), "digests": {str(i): found for i, found in digests.items()}})
    stored = read_json(file)
    return {int(i): found for i, found in stored["digests"].items()}, stored["seconds"]


def _kill_settings(folder: Path) -> dict[str, Any]:
    return {"prompts": folder / "prompts", "workers": 2, "shard_size": KILL_SHARD, "seconds_per_row": KILL_SECONDS_PER_ROW}


def _kill_once(folder: Path, kind: str, trial: int, reference: dict[int, str], seconds: float) -> dict[str, Any]:
    run_folder = folder / "killed"
    prepare(run_folder, **_kill_settings(folder))
    moment = random.Random(f"{kind} {trial}").uniform(0.0, seconds)
    driver, victim, left = Driver(run_folder), kind, []
    code = driver.wait(until=lambda: driver.seconds() >= moment and (kind == "driver" or bool(driver.workers())))
    entry = {"kind": kind, "trial": trial, "planned_s": round(moment, 2), "killed_s": round(driver.seconds(), 2), "parts": driver.parts()}
    if code is not None:
        victim = "none: the run was over"
    elif kind == "driver":
        left = driver.kill()
        driver = Driver(run_folder)  # at once: the killed one's workers are still writing
        code = driver.wait()
    else:
        left, workers = driver.descendants(), driver.workers()
        if workers:
            chosen = random.Random(f"victim {trial}").choice(workers)
            victim = title(chosen)
            chosen.kill()
        code = driver.wait()
    reap(left)
    try:
        digests, problem = read_digests(driver.output), None
    except ValueError as error:
        digests, problem = {}, str(error)
    exact = code == 0 and digests == reference
    differing = sum(digests.get(i) != found for i, found in reference.items())
    return entry | {
        "victim": victim,
        "exit": code,
        "exact": exact,
        "differing": differing,
        "problem": problem,
        "resumed_s": round(driver.seconds(), 2),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["soak", "kills", "drive"], help="drive is what the others start")
    parser.add_argument("--folder", type=Path, required=True, help="where everything is written, and resumed from")
    parser.add_argument("--rows", type=int, default=450_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shard-size", type=int, default=256)
    parser.add_argument("--driver", type=int, default=20, help="kills of the driver")
    parser.add_argument("--workers-killed", type=int, default=20, help="kills of a worker")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.resolve()
    if arguments.what == "drive":
        drive(folder)
        return
    if arguments.what == "soak":
        values = soak(folder, rows=arguments.rows, workers=arguments.workers, shard_size=arguments.shard_size)
    else:
        values = kills(folder, driver=arguments.driver, worker=arguments.workers_killed)
    rows = [{"name": name, "model": "stub", "value": round(value, 3)} for name, value in values.items()]
    print(json.dumps(rows, indent=1) if arguments.json else "\n".join(f"{row['name']:<24} {row['value']:,}" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
