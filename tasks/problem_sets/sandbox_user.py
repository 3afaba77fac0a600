"""Whose a sandboxed program is, and the end of it: the user it runs as, its interpreter, and killing all its processes. See `sandbox`."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.stage import UserError

PRIVATE_UIDS = range(50_000, 60_000)  # no distribution hands these out, and containers map them
NO_GROUP = 65_534


def kill(process: subprocess.Popen, *, uid: int | None, folder: str) -> None:
    """Ends the whole session, then whatever left it, and reaps. The leader is not reaped before, so its group id is still ours.

    Raises RuntimeError where something survives, five seconds long.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    give_up = time.monotonic() + 5
    while alive := (processes_in(folder) if uid is None else processes_of(uid)):
        if time.monotonic() > give_up:
            raise RuntimeError(f"sandbox: processes {alive} of a program survive SIGKILL")
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def processes_of(uid: int) -> list[int]:
    """Living processes of `uid`. From `status`, since the owner of /proc/N can be hidden by its process."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            status = Path("/proc", entry, "status").read_text(errors="replace")
            if f"\nUid:\t{uid}\t" in status and "\nState:\tZ" not in status:
                found.append(int(entry))
    return found


def processes_in(folder: str) -> list[int]:
    """Living processes that were started with this HOME or are in this folder: where a program has no user of its own, this is what tells its
    processes from ours, whatever session they are in. One that takes care to leave both behind is not found."""
    found, home = [], os.fsencode(f"HOME={folder}")
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            process = Path("/proc", entry)
            ours = home in process.joinpath("environ").read_bytes().split(b"\0") or Path(os.readlink(process / "cwd")).is_relative_to(folder)
            if ours and "\nState:\tZ" not in process.joinpath("status").read_text(errors="replace"):
                found.append(int(entry))
    return found


_uids_taken: set[int] = set()
_uids_lock = threading.Lock()


@contextlib.contextmanager
def private_uid() -> Iterator[int | None]:
    """A user id nobody else uses while the program runs; None where this process may not change users."""
    if not started_by_root():
        yield None
        return
    with _uids_lock:
        uid = random.SystemRandom().choice(PRIVATE_UIDS)
        while uid in _uids_taken or processes_of(uid):
            uid = random.SystemRandom().choice(PRIVATE_UIDS)
        _uids_taken.add(uid)
    try:
        yield uid
    finally:
        with _uids_lock:
            _uids_taken.discard(uid)


def started_by_root() -> bool:
    return os.geteuid() == 0


def user_arguments(uid: int | None) -> dict[str, Any]:
    """Of subprocess.Popen."""
    return {} if uid is None else {"user": uid, "group": NO_GROUP, "extra_groups": []}


def environment(folder: str) -> dict[str, str]:
    """All a program sees of the environment. The fixed hash seed makes verdicts repeatable."""
    return {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1"}


@functools.cache
def interpreter(as_private_user: bool) -> str:
    """A Python that the program's user can execute; the project's own may lie in a folder only root can read."""
    uid = PRIVATE_UIDS[0] if as_private_user else None
    check = "import json, resource, sys, types; sys.exit(sys.version_info < (3, 10))"
    candidates = [sys.executable, sys._base_executable, shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")]
    for python in filter(None, dict.fromkeys(candidates)):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [python, "-s", "-S", "-c", check]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            if subprocess.run(command, cwd="/", env=environment("/"), timeout=30, **quiet, **user_arguments(uid)).returncode == 0:
                return python
    raise UserError(f"sandbox: no Python >= 3.10 that an unprivileged user can execute (tried {candidates}); install one, or do not run as root")
