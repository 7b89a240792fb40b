"""Programs written by a model, run in a process of their own within limits.

A program is given wall-clock and CPU seconds, memory and file size, an empty working folder that is deleted
afterwards, no standard input and an empty environment. It has no network: it runs in a network namespace of its own
where the system permits that (`unshare`), and in any case a guard inside its interpreter ends it on the first attempt
at a socket, another process, foreign code or a file written elsewhere. This contains accidents of a model, not an
adversary who knows the guard; run programs of unknown origin in a container.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

GUEST = Path(__file__).with_name("guest.py")
"""What runs in the process; it imports nothing of this package."""


@dataclass(frozen=True)
class Sandbox:
    """Limits of one program.

    Attributes:
        seconds: wall-clock time.
        cpu_seconds: CPU time.
        memory: bytes of address space.
        file_size: bytes a file may have.
    """

    seconds: float = 5.0
    cpu_seconds: int = 4
    memory: int = 512 << 20
    file_size: int = 1 << 20

    def passes(self, program: str) -> bool:
        """Whether `program` runs to its end: no error, no exit, no limit reached, nothing forbidden attempted."""
        return self.run(program) == "passed"

    def run(self, program: str) -> str:
        """`passed`, `timeout`, or what ended it.

        Raises:
            OSError: the process itself cannot be started.
        """
        word = secrets.token_hex(16)  # said at the program's end only: an early exit does not pass
        request = json.dumps({"program": program, "word": word, **asdict(self)})
        environment = {"PATH": os.defpath, "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        command = [*_prefix(), sys.executable, "-I", "-S", "-B", str(GUEST)]
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                out, _ = process.communicate(request.encode(), timeout=self.seconds)
            except subprocess.TimeoutExpired:
                return "timeout"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever it may have started
                process.communicate()
        said = out.decode(errors="replace")
        if process.returncode == 0 and said == word:
            return "passed"
        return said or (f"signal {-process.returncode}" if process.returncode < 0 else "ended early")

    def __str__(self) -> str:
        network = "in a network namespace of its own" if _prefix() else "sockets refused by a guard in the interpreter"
        return f"{self.seconds:g} s, {self.cpu_seconds} s CPU, {self.memory >> 20} MiB, no network ({network})"


@cache
def _prefix() -> tuple[str, ...]:
    """Command that takes the network away; empty where the system does not permit it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    prefix = (unshare, "--user", "--net", "--map-current-user")
    tried = subprocess.run([*prefix, "true"], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    return prefix if tried.returncode == 0 else ()
