"""Runs the documented commands as they stand, in a clean clone, in order: `python -m tests.documented.run_commands [--file README.md ...]`.

    --folder DIR      where the clone is made (default: a new temporary folder); a clone that is there already is used as it is
    --with KIND       run blocks marked `skip KIND` too (gpu, cluster, network, long, yours); may be given several times
    --json            print a list of {"file", "line", "command", "status", "seconds", "skipped", "log"} on stdout

Needs Python's standard library, git and make only: everything else is what the commands themselves install. Blocks of Python are run too, by the
clone's .venv. What is left out is told with its reason. Exit code 1 where a command failed. Each command's output is in DIR-logs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.documented.commands import COMMANDS, KINDS, ROOT, Block, blocks

PATIENCE = 600  # seconds for a server to come up, and to end


class Runner:
    """Commands in one clone."""

    def __init__(self, clone: Path) -> None:
        self._clone, self._logs = clone, clone.with_name(f"{clone.name}-logs")
        self._logs.mkdir(parents=True, exist_ok=True)
        self._environment = {**os.environ, "PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        self._environment.pop("PYTHONPATH", None)  # the clone's packages, not ours

    def block(self, block: Block) -> Iterator[dict[str, Any]]:
        if block.language == COMMANDS:
            server, rest = (block.commands[0], block.commands[1:]) if block.serves else (None, block.commands)
            if server:
                process, record = self._start(block, server)
                yield record
            for command in rest:
                yield self._run(block, command, ["bash", "-c", command])
            if server:
                self._end(process)
        else:
            yield self._run(block, f"(python, {len(block.text.splitlines())} lines)", ["python", "-c", block.text])

    def _run(self, block: Block, command: str, arguments: list[str]) -> dict[str, Any]:
        log, began = self._log(block), time.monotonic()
        with log.open("w") as file:
            done = subprocess.run(arguments, cwd=self._clone, env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        return self._record(block, command, done.returncode, began, log)

    def _start(self, block: Block, command: str) -> tuple[subprocess.Popen, dict[str, Any]]:
        """Its status is 0 once it has said that it is ready, whatever becomes of it afterwards."""
        log, began = self._log(block), time.monotonic()
        with log.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self._clone,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ready = _until(lambda: block.serves in log.read_text(errors="replace") or process.poll() is not None)
        up = ready and block.serves in log.read_text(errors="replace")
        return process, self._record(block, command, 0 if up else process.poll() or 1, began, log)

    def _end(self, process: subprocess.Popen) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)  # its own group: whatever it has started
            if _until(lambda: process.poll() is not None, patience=PATIENCE / 10):
                return

    def _log(self, block: Block) -> Path:
        count = len(list(self._logs.iterdir()))
        return self._logs / f"{count:03d}-{Path(block.file).stem}-{block.line}.log"

    def _record(self, block: Block, command: str, status: int, began: float, log: Path) -> dict[str, Any]:
        seconds = round(time.monotonic() - began, 1)
        return {"file": block.file, "line": block.line, "command": command, "status": status, "seconds": seconds, "skipped": None, "log": str(log)}


def _until(done: Callable[[], bool], *, patience: float = PATIENCE) -> bool:
    end = time.monotonic() + patience
    while not (found := done()) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def clone_to(folder: Path) -> None:
    """What is committed, nothing else."""
    if not (folder / ".git").exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)


def run_all(files: list[Path], runner: Runner, *, kinds: list[str], tell: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    records = []
    for block in (block for file in files for block in blocks(file) if block.language in (COMMANDS, "python")):
        if block.skip and block.skip not in kinds:
            left_out = block.commands if block.language == COMMANDS else ["(python)"]
            found = ({"file": block.file, "line": block.line, "command": c, "skipped": f"{block.skip}: {block.reason}"} for c in left_out)
        else:
            found = runner.block(block)
        for record in found:
            records.append(record)
            tell(record)
    return records


def _told(record: dict[str, Any]) -> str:
    where = f"{record['file']}:{record['line']}"
    if record["skipped"]:
        return f"left out {where}: {record['command']} ({record['skipped']})"
    verdict = "ok    " if record["status"] == 0 else f"FAILED with {record['status']}, see {record['log']}:"
    return f"{verdict} {record['seconds']:8.1f} s  {where}: {record['command']}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.documented.run_commands")
    parser.add_argument("--file", action="append", help="of the source; README.md unless given")
    parser.add_argument("--folder", type=Path, help="where the clone is made")
    parser.add_argument("--with", action="append", dest="kinds", choices=KINDS, default=[], help="run blocks that are marked so too")
    parser.add_argument("--json", action="store_true", help="print the records")
    arguments = parser.parse_args(argv)
    clone = (arguments.folder or Path(tempfile.mkdtemp(prefix="documented-"), "clone")).resolve()
    clone_to(clone)
    files = [clone / name for name in arguments.file or ["README.md"]]
    records = run_all(files, Runner(clone), kinds=arguments.kinds, tell=lambda record: print(_told(record), file=sys.stderr, flush=True))
    failed = [record for record in records if record.get("status")]
    ran = sum(record["skipped"] is None for record in records)
    print(f"{ran - len(failed)} of {ran} commands are fine, {len(records) - ran} were left out; clone: {clone}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(records, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
