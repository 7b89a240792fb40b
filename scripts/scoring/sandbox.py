"""Programs written by a model, run in a sandbox, within limits.

A program is the only process in namespaces of its own (bubblewrap makes them): it sees the system's libraries and the
interpreter, read-only, and an empty working folder in memory; no home, no other process, no network, no environment. It
has no privileges, and the kernel refuses it what namespaces do not hold (`system_calls`). Time, memory, files and
output are bounded. Where no such sandbox can be made, nothing is run.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from mtad.errors import InvalidInput
from scripts.scoring.system_calls import seccomp_filter

GUEST = Path(__file__).with_name("guest.py")
"""What runs in the process; it imports nothing of this package."""

SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
"""What an interpreter may need of the system."""


@dataclass(frozen=True)
class Sandbox:
    """Limits of one program.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: CPU time.
        memory: bytes of address space.
        file_size: bytes a file may have; its folder holds 16 times as many.
    """

    seconds: float = 5.0
    cpu_seconds: int = 4
    memory: int = 512 << 20
    file_size: int = 1 << 20

    def check(self) -> None:
        """See that programs can be run here.

        Raises:
            InvalidInput: no sandbox can be made; it says what is missing.
        """
        if said := _problem():
            raise InvalidInput("sandbox", "none", f"programs of a model are not run without one: {said}")

    def passes(self, program: str) -> bool:
        """Whether `program` runs to its end: no error, no exit, no limit reached."""
        return self.run(program) == "passed"

    def run(self, program: str) -> str:
        """`passed`, `timeout`, or what ended it.

        Raises:
            InvalidInput: as `check` does.
        """
        self.check()
        word = secrets.token_hex(16)  # said at the program's end only: an early exit does not pass
        request = json.dumps({"program": program, "word": word, **asdict(self)})
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:  # files: their size is limited
            given.write(request.encode())
            given.seek(0)
            try:
                code = _start(16 * self.file_size, self.seconds, given.fileno(), out.fileno()).returncode
            except subprocess.TimeoutExpired:
                return "timeout"
            out.seek(0)
            said = out.read(400).decode(errors="replace")
        if code == 0 and said == word:
            return "passed"
        return said or (f"signal {code - 128}" if code > 128 else "ended early")


def _start(folder_size: int, seconds: float, given: int, out: int) -> subprocess.CompletedProcess[bytes]:
    """Run the guest in namespaces of its own; when the time is over, all that is in them is killed."""
    rules = seccomp_filter()
    bubblewrap = shutil.which("bwrap")
    assert rules
    assert bubblewrap
    interpreter = Path(sys.base_prefix).resolve()
    command = [bubblewrap, "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--die-with-parent"]
    command += ["--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    command += ["--clearenv", "--setenv", "PYTHONHASHSEED", "0", "--setenv", "LC_ALL", "C.UTF-8"]
    for path in SYSTEM:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    command += ["--ro-bind", str(interpreter), str(interpreter), "--ro-bind", str(GUEST), "/guest.py", "--dev", "/dev"]
    command += ["--size", str(folder_size), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    with tempfile.TemporaryFile() as filters:
        filters.write(rules)
        filters.seek(0)
        command += ["--seccomp", str(filters.fileno()), "--"]
        command += [str(Path(sys.executable).resolve()), "-I", "-S", "-B", "/guest.py"]
        return subprocess.run(
            command,
            check=False,
            stdin=given,
            stdout=out,
            stderr=out,
            timeout=seconds,
            pass_fds=[filters.fileno()],
        )


@cache
def _problem() -> str:
    """Why no sandbox can be made here; empty if one can."""
    if seccomp_filter() is None:
        return "the known calls to refuse are those of Linux on x86_64 and aarch64"
    if shutil.which("bwrap") is None:
        return "install bubblewrap, for example with `apt-get install bubblewrap`"
    request = json.dumps({"program": "", "word": "ready", **asdict(Sandbox())})
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
        given.write(request.encode())
        given.seek(0)
        _start(1 << 20, 60.0, given.fileno(), out.fileno())
        out.seek(0)
        said = out.read().decode(errors="replace").strip()
    if said == "ready":
        return ""
    return f"bubblewrap cannot make namespaces ({said[-200:]}); permit user namespaces on this system"
