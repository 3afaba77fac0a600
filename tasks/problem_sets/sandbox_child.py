"""The inside of the sandbox: confines its own process, then runs one untrusted program in it.

Never imported by the project: `sandbox.py` hands this text to a bare interpreter through `python -c`, because the interpreter runs as a
user that may not read the project. Standard library only. It covers namespaces, resource limits and the proof of success; choosing the
user, the clean environment, the wall clock and killing survivors are the parent's job.

    argv[1]  descriptor of the channel to the parent; stdin holds the job as JSON: {source, uid, cpu_s, memory_mb, file_mb, processes}
    channel  child writes one JSON line {"ready": [active protections]} or {"error": reason} before the program starts, then either the
             nonce that was waiting in the channel (the tests ran to their end) or one JSON line {"reason", "detail"}.
"""

import json
import os
import resource
import signal
import sys
import types

try:
    import ctypes
except ImportError:  # a minimal interpreter: no namespaces then, and the ready line says so
    ctypes = None

NEW_MOUNT, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, SYS_MOUNT_SETATTR = 1, 38, 442
MB = 1 << 20


def enter_namespaces(libc, file_mb: int) -> list:
    """Own user, network, IPC and process namespaces, and a read-only file system; returns the names of what was granted."""
    uid, gid, cwd = os.getuid(), os.getgid(), os.getcwd()
    if libc.unshare(NEW_USER | NEW_NET | NEW_IPC | NEW_PID | NEW_MOUNT):
        return []
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    granted = ["network", "processes"]
    private, recursive = 1 << 18, 1 << 14
    read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # struct mount_attr: attr_set = MOUNT_ATTR_RDONLY
    if libc.mount(None, b"/", None, private | recursive, None):
        return granted
    if libc.syscall(SYS_MOUNT_SETATTR, -100, b"/", 0x8000, ctypes.byref(read_only), ctypes.c_size_t(32)):
        return granted
    if libc.mount(b"tmpfs", os.fsencode(cwd), b"tmpfs", 2 | 4, f"size={file_mb}m,mode=700".encode()) == 0:
        os.chdir(cwd)
        granted.append("files")
    return granted


def become_grandchild(libc) -> None:
    """Goes on as process 2 of the new process namespace; processes 0 and 1 only wait, and end everything when the program ends."""
    for init in (False, True):
        child = os.fork()
        if child:
            pid = status = 0
            while pid != child:
                pid, status = os.wait()
            # A death by signal becomes 128 + signal, as in a shell. Ending process 1 makes the kernel kill the whole namespace.
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)
        if not init:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # process 1 dies with the outer process, which the parent can kill
    os.setsid()


def drop_capabilities(libc) -> None:
    """The user namespace gave all capabilities inside it; the program needs none."""
    header, empty = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(ctypes.byref(header), ctypes.byref(empty)):
        raise OSError("capabilities could not be dropped")


def processes_of(uid: int) -> int:
    """Tasks of this user, which RLIMIT_NPROC counts; only asked where no private user or namespace makes the count exact."""
    count = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{entry}").st_uid == uid:
                count += len(os.listdir(f"/proc/{entry}/task"))
        except OSError:
            continue
    return count


def confine(job: dict) -> list:
    """Applies every protection to this process; returns the active ones. Raises where a required one is refused."""
    if job["uid"] is not None and (set(os.getresuid()) != {job["uid"]} or os.getgroups()):
        raise OSError("the process still has its parent's user or groups")
    libc = ctypes.CDLL(None, use_errno=True) if ctypes else None
    active = enter_namespaces(libc, job["file_mb"]) if libc else []
    if libc and libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        active.append("no_new_privileges")
    if libc:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing goes on when the pipeline itself is killed
    if "processes" in active:
        become_grandchild(libc)
        drop_capabilities(libc)
        processes = job["processes"] + 2  # the two that wait
    elif job["uid"] is not None:
        processes = job["processes"]
    else:
        processes = processes_of(os.getuid()) + job["processes"] - 1
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, job["cpu_s"], job["cpu_s"] + 1),
        (resource.RLIMIT_AS, job["memory_mb"] * MB, job["memory_mb"] * MB),
        (resource.RLIMIT_FSIZE, job["file_mb"] * MB, job["file_mb"] * MB),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))
    return active


def describe(error: BaseException, source: str) -> str:
    """'AssertionError: message, at line 7: assert f(1) == 2', the line being the last one of the program itself."""
    text, line, trace = f"{type(error).__name__}: {error}"[:400], 0, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "<program>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{text}, at line {line}: {source.splitlines()[line - 1].strip()[:200]}" if line else text


def main() -> None:
    channel, read, write = int(sys.argv[1]), os.read, os.write

    def say(message: dict) -> None:
        write(channel, json.dumps(message).encode() + b"\n")

    try:
        job = json.loads(sys.stdin.buffer.read())
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        active = confine(job)
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    say({"ready": active})

    # A real module, so that dataclasses and pickle work; not "__main__", so that a script's demo part does not run.
    module = sys.modules["solution"] = types.ModuleType("solution")
    source = job["source"]
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
    except MemoryError:
        say({"reason": "memory", "detail": f"more than {job['memory_mb']} MB"})
    except SystemExit:
        say({"reason": "exited", "detail": "SystemExit before the tests ended"})
    except BaseException as error:
        say({"reason": "failed", "detail": describe(error, source)})
    else:
        write(channel, read(channel, 64))
        os._exit(0)
    os._exit(1)


main()
