"""Programs of a model run within limits: what is right passes, and nothing else does, however it ends."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.scoring import sandbox
from scripts.scoring.sandbox import Sandbox

LIMITS = Sandbox(seconds=120.0, cpu_seconds=10, memory=256 << 20, file_size=1 << 16)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 + 1 == 2",
        "import math, re, collections, itertools, hashlib, random, datetime\nassert hashlib.md5(b'').hexdigest()",
        "print('x' * 100_000)",
        "open('note.txt', 'w').write('x' * 100)\nassert open('note.txt').read() == 'x' * 100",
    ],
)
def test_programs_that_come_to_their_end_pass(program: str) -> None:
    assert LIMITS.run(program) == "passed"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended early"),
        ("def f():\n    return f()\nf()", "RecursionError"),
        ("x = bytearray(10**10)", "MemoryError"),
        ("x = []\nwhile True:\n    x.append(bytearray(10**7))", "MemoryError"),
        ("import socket\ntry:\n    socket.socket()\nexcept BaseException:\n    pass", "forbidden: socket"),
        (
            "import socket\ntry:\n    socket.getaddrinfo('localhost', 80)\nexcept OSError:\n    pass",
            "forbidden: socket",
        ),
        ("import os\nos.system('true')", "forbidden: os.system"),
        ("import subprocess\nsubprocess.run(['true'])", "forbidden: subprocess"),
        ("import os\nos.fork()", "forbidden: os.fork"),
        ("import ctypes", "forbidden: ctypes"),
        ("open('../escaped', 'w')", "forbidden: writing"),
        ("import os\nos.open('/tmp/escaped', os.O_WRONLY | os.O_CREAT)", "forbidden: writing"),
        ("f = open('big', 'wb')\nf.write(bytes(10**6))\nf.flush()", "OSError"),
    ],
)
def test_everything_else_fails_and_says_why(program: str, said: str) -> None:
    assert LIMITS.run(program).startswith(said)


def test_an_endless_loop_ends_by_cpu_time_and_an_endless_sleep_by_the_clock() -> None:
    assert replace(LIMITS, cpu_seconds=1).run("while True:\n    pass") in ("signal 9", "signal 24")
    assert replace(LIMITS, seconds=0.5).run("import time\ntime.sleep(1000)") == "timeout"


def test_the_word_that_means_passed_cannot_be_guessed_or_printed() -> None:
    words = "import sys\nsys.stdout.write('passed')\nsys.stdout.flush()\nraise SystemExit(0)"
    assert not LIMITS.passes(words)
    assert not LIMITS.passes("import os\nos.write(1, b'passed')\nos._exit(0)")


def test_a_program_sees_no_environment_input_or_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    assert LIMITS.passes("import os\nassert 'SECRET_TOKEN' not in os.environ")
    assert LIMITS.passes("import sys\nassert sys.stdin.read() == ''")
    assert LIMITS.run("import torch") == "ModuleNotFoundError"


def test_without_a_network_namespace_the_guard_holds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_prefix", lambda: ())
    assert "guard" in str(LIMITS)
    assert LIMITS.run("import socket\nsocket.create_connection(('127.0.0.1', 9))").startswith("forbidden: socket")
    assert LIMITS.passes("pass")


@pytest.mark.skipif(not sandbox._prefix(), reason="this system does not permit network namespaces")
def test_a_namespace_has_no_network_even_without_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unguarded = tmp_path / "guest.py"
    source = sandbox.GUEST.read_text().replace("sys.addaudithook(guard)", "")
    unguarded.write_text(source)
    program = (
        "import socket\n"
        "assert [name for _, name in socket.if_nameindex()] == ['lo']\n"
        "try:\n    socket.create_connection(('1.1.1.1', 80), timeout=1)\n"
        "except OSError as error:\n    assert error.errno == 101, error\n"
        "else:\n    raise AssertionError\n"
    )
    monkeypatch.setattr(sandbox, "GUEST", unguarded)
    assert LIMITS.run(program) == "passed"


def test_the_interpreter_is_the_one_that_runs_the_tests() -> None:
    assert LIMITS.passes(f"import sys\nassert sys.version_info[:2] == {sys.version_info[:2]!r}")
