"""What a model wrote runs within limits: what is right passes, nothing else does, and nothing gets out."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mtad.errors import InvalidInput
from scripts.evaluation.prompts import open_set
from scripts.scoring import sandbox, system_calls
from scripts.scoring.sandbox import Sandbox
from scripts.scoring.sqlite import QueryError, run, same_result

LIMITS = Sandbox(seconds=120.0, cpu_seconds=10, memory=256 << 20, file_size=1 << 16)

sandboxed = pytest.mark.skipif(bool(sandbox._problem()), reason=f"no sandbox here: {sandbox._problem()}")


@sandboxed
@pytest.mark.parametrize(
    "program",
    [
        f"import sys\nassert sys.version_info[:2] == {sys.version_info[:2]!r}",  # the interpreter that runs the tests
        "import math, re, collections, itertools, hashlib, random, datetime\nassert hashlib.md5(b'').hexdigest()",
        "print('x' * 100_000)",
        "open('note.txt', 'w').write('x' * 100)\nassert open('note.txt').read() == 'x' * 100",
        "import threading\nthread = threading.Thread(target=print)\nthread.start()\nthread.join()",
    ],
)
def test_programs_that_come_to_their_end_pass(program: str) -> None:
    assert LIMITS.run(program) == "passed"


@sandboxed
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.stdout.write('passed')\nsys.stdout.flush()\nsys.exit(0)", "SystemExit"),
        ("import os\nos.write(1, b'passed')\nos._exit(0)", "ended early"),
        ("def f():\n    return f()\nf()", "RecursionError"),
        ("import ctypes\nctypes.string_at(0)", "signal 11"),
    ],
)
def test_everything_else_fails_and_says_why(program: str, said: str) -> None:
    assert LIMITS.run(program) == said


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file in this account's home folder that holds the word `secret`."""
    path = Path.home() / f".sandbox-test-{os.getpid()}"
    path.write_text("secret")
    yield path
    path.unlink()


REFUSED = """\
import _thread, ctypes, errno, os, socket, subprocess, sys, time

def refused(*acts):
    for act in acts:
        try:
            act()
        except OSError:
            continue
        raise SystemError
"""
HELD = {  # each is right if what it tries does not work
    "a file in the home folder": "refused(lambda: open(SECRET))",
    "a link to it": "os.symlink(SECRET, 'link')\nrefused(lambda: open('link').read())",
    "a link out of its folder": "os.symlink('/', 'root')\nrefused(lambda: open('root/escaped', 'w'))",
    "writing elsewhere": (
        "for path in ('/', '/dev/', '/dev/shm/', '/usr/', '../', sys.base_prefix + '/'):\n"
        "    refused(lambda: open(path + 'escaped', 'w'))"
    ),
    "changing the interpreter's rights": "refused(lambda: os.chmod(sys.executable, 0o777))",
    "a server of this machine": "refused(lambda: socket.create_connection(('127.0.0.1', PORT), 5))",
    "other kinds of sockets": (
        "for family in (1, 2, 10, 16, 17, 38, 40):\n"
        "    kind = socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM\n"
        "    refused(lambda: socket.socket(family, kind))"
    ),
    "another process": (
        "refused(os.fork, os.forkpty, lambda: subprocess.run(['/bin/true']))\n"
        "refused(lambda: os.posix_spawn('/bin/true', ['true'], {}))"
    ),
    "its parent, and all other processes": (
        "assert (os.getpid(), os.getppid()) == (1, 0)\nassert not os.path.exists('/proc/1')\n"
        "refused(lambda: os.kill(PARENT, 9))\ntry:\n    os.kill(-1, 9)\nexcept OSError:\n    pass"
    ),
    "tracing": (
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.ptrace(16, PARENT, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM"
    ),
    "namespaces and privileges": (
        "libc = ctypes.CDLL(None)\n"
        "assert libc.unshare(0x10000000) == -1\nassert libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0) == -1\n"
        "assert libc.prctl(39, 0, 0, 0, 0) == 1, 'privileges may be gained'\n"
        "refused(lambda: os.setuid(0), lambda: os.chroot('/'))"
    ),
    "memory of many threads": (
        "def ends():\n    kept = []\n    try:\n        while True:\n            kept.append(bytearray(10**6))\n"
        "    except MemoryError:\n        kept.clear()\n"
        # threading.Thread would wait for one that never begins
        "for _ in range(4):\n    try:\n        _thread.start_new_thread(ends, ())\n"
        "    except RuntimeError:\n        pass  # there is no memory for its stack\n"
        "time.sleep(0.5)"
    ),
    "memory that counts as nobody's": (
        "assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) == -1\n"
        "def fill():\n    for number in range(10**4):\n        open(str(number), 'wb').write(bytes(60_000))\n"
        "refused(fill)"
    ),
    "environment, arguments, input": (
        "assert set(os.environ) <= {'PWD', 'LC_ALL', 'PYTHONHASHSEED'}, os.environ\n"
        "assert sys.stdin.read() == ''\nassert os.listdir('.') == []"
    ),
    "packages of this environment": (
        "try:\n    import torch\nexcept ModuleNotFoundError:\n    pass\nelse:\n    raise SystemError"
    ),
}


@sandboxed
@pytest.mark.parametrize("what", HELD)
def test_a_hostile_program_does_not_get(what: str, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        known = {"SECRET": str(secret), "PORT": listening.getsockname()[1], "PARENT": os.getpid()}
        values = "".join(f"{name} = {value!r}\n" for name, value in known.items())
        assert LIMITS.run(REFUSED + values + HELD[what]) == "passed"


@sandboxed
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("while True:\n    pass", "signal 9"),
        ("x = bytearray(10**10)", "MemoryError"),
        ("x = []\nwhile True:\n    x.append(bytearray(10**7))", "MemoryError"),
        ("import os\nwhile True:\n    os.fork()", "PermissionError"),
        ("f = open('big', 'wb')\nf.write(bytes(10**6))\nf.flush()", "OSError"),
        (
            "import sys\nsys.path.insert(0, '/usr/lib/python3/dist-packages')\nraise ValueError('x' * 10**7)",
            "ValueError",
        ),
    ],
)
def test_a_bomb_ends_by_its_limit(program: str, said: str) -> None:
    assert replace(LIMITS, cpu_seconds=1).run(program) == said


@sandboxed
def test_an_endless_sleep_ends_by_the_clock_with_all_its_threads() -> None:
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\ntime.sleep(1000)"
    assert replace(LIMITS, seconds=0.5).run(program) == "timeout"


@sandboxed
def test_endless_output_is_cut_off() -> None:
    write = "    try:\n        while True:\n            os.write(file, b'x' * 4096)\n    except OSError:\n        pass"
    said = LIMITS.run(f"import os\nfor file in (0, *range(3, 64)):\n{write}")
    assert said != "passed"
    assert len(said) <= 400


def functions(folder: Path) -> str:
    """A set of functions with tests."""
    prompt = 'def largest(values):\n    """The largest value."""\n'
    line = json.dumps({"prompt": prompt, "tests": "assert largest([1, 3, 2]) == 3"})
    (folder / "functions.jsonl").write_text(f"{line}\n" * 4)
    return f"jsonl={folder / 'functions.jsonl'}"


@sandboxed
def test_a_function_is_right_if_its_tests_pass(tmp_path: Path) -> None:
    own = open_set(functions(tmp_path))
    assert own.verify
    assert own.verify(0, "    return max(values)\n")
    assert not own.verify(0, "    return values[0]\n")
    assert not own.verify(1, "    import sys\n    sys.exit(0)\n")


@pytest.mark.parametrize("missing", ["bubblewrap", "namespaces", "known calls"])
def test_where_there_is_no_sandbox_nothing_is_evaluated(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unable = tmp_path / "bwrap"
    unable.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    unable.chmod(0o755)
    found = {"bubblewrap": None, "namespaces": str(unable), "known calls": shutil.which("bwrap")}
    monkeypatch.setattr(shutil, "which", lambda _: found[missing])
    if missing == "known calls":
        monkeypatch.setattr(sandbox, "seccomp_filter", lambda: system_calls.seccomp_filter("riscv64"))
    problems = functions(tmp_path)
    sandbox._problem.cache_clear()
    try:
        with pytest.raises(InvalidInput, match={"bubblewrap": "apt-get install bubblewrap"}.get(missing, missing)):
            LIMITS.run("raise SystemExit")
        with pytest.raises(InvalidInput):
            open_set(problems)
    finally:
        sandbox._problem.cache_clear()


def test_a_query_reads_and_does_nothing_else(tmp_path: Path) -> None:
    database, file = {"schema": "CREATE TABLE t (a);", "rows": {"t": [[1], [2]]}}, tmp_path / "escaped.db"
    assert run(database, "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 3) SELECT i FROM n, t")
    forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    for query in (
        *("DELETE FROM t", "DROP TABLE t", "PRAGMA query_only = OFF", f"VACUUM INTO '{file}'", f"ATTACH '{file}' AS x"),
        *("SELECT 1; SELECT 2", "SELECT load_extension('x')", "SELECT randomblob(10000000)", "SELEC", forever),
        *("SELECT * FROM t a, t b, t c, t d, t e, t f, t g, t h, t i, t j, t k", "\x00", "(" * 5000, "SELECT '\ud800'"),
        *("SELECT hex(zeroblob(6000))", f"SELECT 'a' LIKE '{'%a' * 60}'"),
    ):
        with pytest.raises(QueryError):
            run(database, query)
    assert not file.exists()


def test_an_integer_equals_its_float_in_any_order() -> None:
    assert all(same_result([(1,), (2,)], [(1.0,), (2.0,)], ordered) for ordered in (True, False))
    assert same_result([(1, "a"), (None, "b")], [(None, "b"), (1, "a")], ordered=False)
    assert not same_result([(1,), (1,), (2,)], [(1,), (2,), (2,)], ordered=False)
