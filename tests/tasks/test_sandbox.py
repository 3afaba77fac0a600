import os
import time
from pathlib import Path

import pytest

from tasks.problem_sets import sandbox, sandbox_user
from tasks.problem_sets.sandbox import SandboxConfig, protections, run_many, run_program
from tasks.stage import UserError

CONFIG = SandboxConfig(allow_code_execution=True, timeout_s=10)
SHORT = SandboxConfig(allow_code_execution=True, timeout_s=1)


@pytest.fixture(params=["full", "without_namespaces"])
def host(request, monkeypatch, tmp_path):
    """Every case also runs as on a host whose kernel grants no namespaces."""
    if request.param == "without_namespaces":
        child = tmp_path / "child.py"
        child.write_text(sandbox.CHILD.read_text().replace("import ctypes\n", "raise ImportError\n"))
        monkeypatch.setattr(sandbox, "CHILD", child)
    return request.param


@pytest.fixture
def shielded(host):
    """Skips where nothing shields this user's files and processes: such a program could really end the session that runs the tests."""
    if os.geteuid() != 0 and any(line.startswith(("missing: process", "missing: read-only")) for line in protections(CONFIG)):
        pytest.skip("neither root nor namespaces")


@pytest.mark.parametrize(
    "source, reason, detail",
    [
        ("def f(): return 1\nassert f() == 1", "passed", ""),
        ("def f(): return 1\nassert f() == 2", "failed", "at line 2: assert f() == 2"),
        ("def f(: pass", "failed", "SyntaxError"),
        ("x = 1\n\0", "failed", "null bytes"),
        ("input()", "failed", "EOFError"),
        ("import sys\nsys.exit(0)\nassert False", "exited", "SystemExit"),
        ("import os\nos._exit(0)\nassert False", "exited", "code 0"),
        ("print('passed')\nraise KeyboardInterrupt", "failed", "KeyboardInterrupt"),
        ("x = bytearray(1 << 31)", "memory", "512 MB"),
        ("x = [[0] * (1 << 20) for _ in range(1 << 10)]", "memory", "512 MB"),
        ("import ctypes\nctypes.string_at(0)", "killed", "signal 11"),
        ("import os\nassert os.fork() >= 0", "failed", "Error"),
        ("import threading\nthreading.Thread(target=print).start()", "failed", "RuntimeError"),
        ("import os\nassert not set(os.environ) - {'PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE', 'PYTHONHASHSEED', 'PYTHONSAFEPATH'}", "passed", ""),
        ("import os, tempfile\nassert os.listdir('.') == []\ntempfile.TemporaryFile().write(b'x')", "passed", ""),
        ("open('big', 'wb').write(bytes(64 << 20))", "failed", "OSError"),
        ("def f(n): return f(n + 1)\nf(0)", "failed", "RecursionError"),
    ],
)
def test_verdicts(host, source, reason, detail):
    result = run_program(source, CONFIG)
    assert (result.reason, result.passed) == (reason, reason == "passed")
    assert detail in result.detail and "\n" not in result.detail.strip()


@pytest.mark.parametrize("source", ["while True: pass", "import time\ntime.sleep(60)", "try:\n    while True: pass\nexcept BaseException: pass"])
def test_wall_clock_is_hard(host, source):
    started = time.monotonic()
    assert run_program(source, SHORT).reason == "timeout"
    assert time.monotonic() - started < 20


def test_cpu_time_is_limited(host):
    config = SandboxConfig(allow_code_execution=True, timeout_s=60, cpu_s=1)
    if host == "full":
        assert run_program("while True: pass", config).detail == "more than 1 s of CPU time"
    else:  # the soft limit can be ignored, the hard one a second later cannot
        assert run_program("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", config).reason == "killed"


def test_much_output_is_dropped(host):
    source = "for _ in range(100): print('x' * (1 << 20))\nprint('the end', flush=True)\nimport os\nos._exit(3)"
    result = run_program(source, CONFIG)
    assert result.reason == "exited" and result.detail.endswith("the end") and len(result.detail) < 500
    assert run_program("print('x' * (100 << 20))", CONFIG).passed


def test_nothing_is_written_outside_the_temporary_folder(shielded, tmp_path):
    target = tmp_path / "outside"
    tmp_path.chmod(0o755)
    result = run_program(f"open({str(target)!r}, 'w')", CONFIG)
    assert not result.passed and "Error" in result.detail
    assert not target.exists()


def test_temporary_folder_is_deleted(shielded, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    for source in ("open('a', 'w').write('1')\nimport os\nos.mkdir('b', 0)", "import time\ntime.sleep(60)"):
        run_program(source, SHORT)
        assert list((tmp_path / "base").iterdir()) == []


def test_parent_cannot_be_killed(shielded):
    source = "import os, signal\nfor pid in (os.getppid(), {}, -1, 0):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\nassert False"
    assert not run_program(source.format(os.getpid()), CONFIG).passed  # and this test still runs


LEAVES_A_SURVIVOR = """import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}], {environment})
    os._exit(0)
import time
time.sleep(0.5)"""


def test_survivors_are_killed(shielded):
    survivors_of("os.environ")


@pytest.mark.parametrize("environment", ["os.environ", "{}"], ids=["found_by_environment", "found_by_folder"])
def test_survivors_are_killed_without_root_and_namespaces(monkeypatch, tmp_path, environment):
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace("import ctypes\n", "raise ImportError\n"))
    monkeypatch.setattr(sandbox, "CHILD", child)
    for module in (sandbox, sandbox_user):
        monkeypatch.setattr(module, "started_by_root", lambda: False)
    survivors_of(environment)


def survivors_of(environment: str) -> None:
    marker = f"survivor-{os.getpid()}-{time.time_ns()}"
    config = SandboxConfig(allow_code_execution=True, timeout_s=10, processes=4)
    assert run_program(LEAVES_A_SURVIVOR.format(marker=marker, environment=environment), config).passed
    time.sleep(0.2)
    assert [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and marker in _read(entry / "cmdline")] == []


@pytest.mark.parametrize("bomb", ["while True: os.fork()", "while True:\n    try: os.fork()\n    except OSError: pass"], ids=["naive", "stubborn"])
def test_a_fork_bomb_goes_off_inside(shielded, tmp_path, monkeypatch, bomb):
    """Every process of it counts against the limit of 8, and none outlives the verdict."""
    base, seen = tmp_path / "base", []
    base.mkdir()
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(base))

    def kill(process, **whose):
        seen.append(len(living(base)))
        sandbox_user.kill(process, **whose)

    monkeypatch.setattr(sandbox, "kill", kill)
    started = time.monotonic()
    result = run_program(f"import os\n{bomb}", SandboxConfig(allow_code_execution=True, timeout_s=1, processes=8))
    assert not result.passed and time.monotonic() - started < 10
    assert seen[0] <= 8 + 3  # with the two that wait inside the namespace, and the outer one
    assert living(base) == [] and list(base.iterdir()) == []


def living(base: Path) -> list[str]:
    """Processes of a program whose temporary folder is in `base`."""
    found = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and f"HOME={base}/" in _read(entry / "environ")]
    return [name for name in found if "\nState:\tZ" not in _read(Path("/proc", name, "status"))]


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a program a user of its own")
def test_root_is_dropped(host):
    source = (
        "import os\nuids = set(os.getresuid())\nassert len(uids) == 1 and uids.pop() >= 50000, uids\n"
        "assert set(os.getresgid()) == {65534}\nopen('/etc/shadow')"
    )
    assert "PermissionError" in run_program(source, CONFIG).detail


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a program a user of its own")
def test_refuses_where_the_user_cannot_be_dropped(monkeypatch):
    run_program("", CONFIG)  # the interpreter is found
    with monkeypatch.context() as patch:  # dropped without effect: the child looks
        patch.setattr(sandbox, "user_arguments", lambda uid: {})
        with pytest.raises(UserError, match="still has its parent's user"):
            run_program("raise SystemExit('this never ran')", CONFIG)
    with monkeypatch.context() as patch:  # dropped halfway: a group of root's left
        patch.setattr(sandbox, "user_arguments", lambda uid: {"user": uid, "group": sandbox.NO_GROUP, "extra_groups": [0]})
        with pytest.raises(UserError, match="still has its parent's user or groups"):
            run_program("", CONFIG)

    def forbidden(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(sandbox.subprocess, "Popen", forbidden)  # as setuid() in a container that may not
    with pytest.raises(UserError, match="no confined process could be started .*Operation not permitted"):
        run_program("", CONFIG)


def test_channel_written_too_early_is_no_proof(host):
    source = "import os\nfor fd in range(3, 4096):\n    try: os.write(fd, b'0' * 32 + b'{\"error\": \"no\"}\\n' * 9999)\n    except OSError: pass\n"
    assert not run_program(source, CONFIG).passed


def test_network_is_cut_off_where_the_host_can():
    if not any(line.startswith("network") for line in protections(CONFIG)):
        pytest.skip("no network namespace on this host")
    source = "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']\nsocket.create_connection(('127.0.0.1', 22), 1)"
    assert "unreachable" in run_program(source, CONFIG).detail


def test_many_keep_their_order():
    sources = [f"assert {number} % 3" for number in range(9)]
    assert [result.passed for result in run_many(sources, CONFIG)] == [number % 3 != 0 for number in range(9)]


def test_protections_tell_what_is_missing(host):
    lines = protections(CONFIG)
    assert any(line.startswith("limits: 10 s wall") for line in lines)
    if host == "without_namespaces":
        assert any(line.startswith("missing: network") for line in lines)


def test_refuses_without_permission_or_protection(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="allow_code_execution"):
        run_program("", SandboxConfig())
    with pytest.raises(UserError, match="timeout_s"):
        SandboxConfig(timeout_s=0)
    child = tmp_path / "child.py"
    child.write_text(sandbox.CHILD.read_text().replace("resource.setrlimit(limit", "resource.setrlimit(99"))
    monkeypatch.setattr(sandbox, "CHILD", child)
    with pytest.raises(UserError, match="refuses a required protection"):
        run_program("raise SystemExit('this never ran')", CONFIG)


def test_refuses_without_an_interpreter_the_user_can_run(monkeypatch):
    sandbox_user.interpreter.cache_clear()
    monkeypatch.setattr(sandbox_user.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(sandbox_user.sys, "_base_executable", "/nowhere/python")
    monkeypatch.setattr(sandbox_user.shutil, "which", lambda *args, **kwargs: None)
    with pytest.raises(UserError, match="no Python >= 3.10"):
        run_program("", CONFIG)
    sandbox_user.interpreter.cache_clear()
