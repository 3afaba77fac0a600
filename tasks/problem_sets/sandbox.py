"""Runs untrusted generated code: one short-lived, confined subprocess per program, a verdict back.

A program is Python source whose last lines assert. It passes only when a random nonce comes back through a private channel, which the
child reads and returns after the last line has run: `sys.exit(0)`, `os._exit(0)` or printing "passed" in the middle cannot pass.

Protections: own session, private temporary folder, empty environment, no stdin, capped output, wall clock, and limits on CPU time,
memory, file size, processes, open files and cores. Started by root, a program runs as an unprivileged user of its own, so limits bind and
nothing of it can survive (see sandbox_user). Where the kernel allows user namespaces, it also has no network, a process namespace and a
read-only file system.
`protections` tells what is active on this host.

Limits, honestly: tests and tested code share one interpreter, so code written to deceive *this* sandbox (walk the stack, read the channel,
return objects that equal everything) can pass; readable files stay readable; a kernel bug is not stopped. It is meant for the mistakes of
a language model, not for an attacker. It does not know problems or prompts: see scoring.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tasks.problem_sets.sandbox_user import NO_GROUP, environment, interpreter, kill, private_uid, started_by_root, user_arguments
from tasks.stage import NOT_HASHED, UserError

CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass
class SandboxConfig:
    """How generated code is run. Nothing runs before `allow_code_execution` says so."""

    allow_code_execution: bool = field(default=False, metadata=NOT_HASHED)  # opt-in: executing model output is a risk only the user can take
    timeout_s: float = 10.0  # wall clock of one program
    cpu_s: int = 10  # CPU seconds of one process of the program
    memory_mb: int = 512  # address space of one process
    file_mb: int = 16  # largest file, and all files together where the file system is read-only
    processes: int = 1  # processes and threads, the program itself included
    max_output_kb: int = 16  # kept of stdout and stderr together; the rest is read and dropped
    workers: int = field(default=2, metadata=NOT_HASHED)  # programs that run at once

    def __post_init__(self) -> None:
        for name in ("timeout_s", "cpu_s", "memory_mb", "file_mb", "processes", "max_output_kb", "workers"):
            if getattr(self, name) <= 0:
                raise UserError(f"sandbox.{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class SandboxResult:
    """The verdict on one program."""

    passed: bool
    reason: str  # passed | failed | exited (before its tests ended) | timeout | memory | killed | no_completion (given by scoring)
    detail: str  # what went wrong, for a person; the end of the output where the program died without a word


def run_program(source: str, config: SandboxConfig) -> SandboxResult:
    """Runs `source` and waits for it.

    Raises:
        UserError: execution is not allowed by `config`, or this host refuses a required protection.
    """
    result, _ = _run(source, config)
    return result


def run_many(sources: list[str], config: SandboxConfig) -> list[SandboxResult]:
    """`run_program` over `sources`, `config.workers` at a time; results in the order of `sources`."""
    with ThreadPoolExecutor(config.workers) as pool:
        return list(pool.map(lambda source: run_program(source, config), sources))


def protections(config: SandboxConfig) -> list[str]:
    """What confines a program on this host, found out by running an empty one; what is missing is listed as 'missing: ...'."""
    _, active = _run("", config)
    if started_by_root():
        user = "user: an unprivileged uid of its own per program, no groups; survivors are found and killed by it"
    else:
        user = "missing: user of its own (only root can give one), what this user can read is readable; survivors are found by environment and folder"
    optional = {
        "network": ("network: none (own network namespace)", "network namespace, a program can reach the network"),
        "processes": ("processes: own process namespace, ended as a whole", "process namespace, a program sees others and can signal its user's"),
        "files": (
            f"files: read-only but for a temporary folder of {config.file_mb} MB",
            "read-only file system, what its user can write is writable",
        ),
        "no_new_privileges": ("privileges: none can be gained (no_new_privs)", "no_new_privs, setuid programs can be started"),
    }
    return [
        "subprocess: own session, empty environment, closed stdin, capped output, temporary folder",
        f"limits: {config.timeout_s:g} s wall, {config.cpu_s} s CPU, {config.memory_mb} MB memory, {config.file_mb} MB files, "
        f"{config.processes} process(es), 64 open files, no cores",
        user,
        *(present if name in active else f"missing: {absent}" for name, (present, absent) in optional.items()),
        f"interpreter: {interpreter(started_by_root())}",
    ]


def _run(source: str, config: SandboxConfig) -> tuple[SandboxResult, list[str]]:
    if not config.allow_code_execution:
        raise UserError("sandbox.allow_code_execution is false: set it to true to let generated code run on this machine")
    python = interpreter(started_by_root())
    nonce = secrets.token_hex(16).encode()
    with private_uid() as uid, tempfile.TemporaryFile() as job, contextlib.ExitStack() as cleanup:
        folder = tempfile.mkdtemp(prefix="sandbox-")
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        if uid is not None:
            os.chown(folder, uid, NO_GROUP)
        limits = {name: getattr(config, name) for name in ("cpu_s", "memory_mb", "file_mb", "processes")}
        # A file, not a pipe: a long program cannot block the writer.
        job.write(json.dumps({"source": source, "uid": uid, **limits}).encode())
        job.seek(0)
        ours, theirs = socket.socketpair()
        cleanup.enter_context(ours)
        ours.sendall(nonce)
        with theirs:
            try:
                process = subprocess.Popen(
                    [python, "-s", "-S", "-B", "-c", CHILD.read_text(), str(theirs.fileno())],
                    stdin=job,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    cwd=folder,
                    env=environment(folder),
                    **user_arguments(uid),
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise UserError(f"sandbox: no confined process could be started ({error}); run where uids can be changed") from error
        try:
            channel, output, timed_out = _watch(process, ours, config)
        finally:
            kill(process, uid=uid, folder=folder)
            process.stdout.close()
    ready, complete, verdict = channel.partition(b"\n")
    # Only what was said before the program ran may refuse; after that the channel is in untrusted hands.
    setup = json.loads(ready) if complete else {"error": f"the child ended early: {output.decode(errors='replace')[-300:].strip()}"}
    if "error" in setup and not timed_out:
        raise UserError(f"sandbox: this host refuses a required protection ({setup['error']}); nothing was run")
    return _verdict(verdict, nonce, output, timed_out, process.returncode, config), setup.get("ready", [])


def _watch(process: subprocess.Popen, ours: socket.socket, config: SandboxConfig) -> tuple[bytes, bytes, bool]:
    """Collects channel and (capped) output until the process ends or its time is up: (channel, output, timed out)."""
    deadline = time.monotonic() + config.timeout_s
    kept = {"channel": b"", "output": b""}
    # The channel's beginning counts (its first line comes from our own code), and the output's end.
    cut = {"channel": slice(64 << 10), "output": slice(-(config.max_output_kb << 10), None)}
    ended = os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector:
        for file, name in ((ours.fileno(), "channel"), (process.stdout.fileno(), "output")):
            os.set_blocking(file, False)
            selector.register(file, selectors.EVENT_READ, name)
        selector.register(ended, selectors.EVENT_READ, "ended")
        timed_out = running = True
        while running and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data == "ended":
                    timed_out = running = False
                elif not (chunk := _read(key.fd)):
                    selector.unregister(key.fd)
                else:
                    kept[key.data] = (kept[key.data] + chunk)[cut[key.data]]
    os.close(ended)
    for file, name in ((ours.fileno(), "channel"), (process.stdout.fileno(), "output")):
        if not running:  # what the ended program had left in its buffers
            kept[name] = (kept[name] + _read(file))[cut[name]]
    return kept["channel"], kept["output"], timed_out


def _read(file: int) -> bytes:
    try:
        return os.read(file, 1 << 16)
    except (BlockingIOError, ConnectionResetError):
        return b""


def _verdict(verdict: bytes, nonce: bytes, output: bytes, timed_out: bool, code: int, config: SandboxConfig) -> SandboxResult:
    tail = output.decode(errors="replace").strip()[-300:]
    signal_number = -code if code < 0 else code - 128  # the waiting process passes a signal on as 128 + signal
    if verdict == nonce:
        return SandboxResult(True, "passed", "")
    if timed_out:
        return SandboxResult(False, "timeout", f"more than {config.timeout_s:g} s")
    if signal_number == signal.SIGXCPU:
        return SandboxResult(False, "timeout", f"more than {config.cpu_s} s of CPU time")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = json.loads(verdict)
        if said["reason"] in ("failed", "memory", "exited"):
            return SandboxResult(False, said["reason"], str(said["detail"]))
    if signal_number > 0:
        return SandboxResult(False, "killed", f"signal {signal_number}; {tail}")
    return SandboxResult(False, "exited", f"ended with code {code} before its tests did; {tail}")
