"""Runs one program under limits it sets for itself; started by `sandbox.py` only, with a request on standard input.

Imports nothing but the standard library: it runs isolated from the environment's packages.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from typing import Any

FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.putenv",
    "shutil.",
    "ctypes.",
    "mmap.",
    "signal.pthread_kill",
)
"""Audit events, or how they begin, that end the program."""


def main() -> None:
    """Run the program of the request; say its word if it comes to its end, else what ended it."""
    request = json.load(sys.stdin)
    for limit, value in (
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_FSIZE, request["file_size"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    out, home = os.dup(1), os.path.join(os.path.realpath(os.getcwd()), "")

    def end(words: str, code: int) -> None:
        os.write(out, words.encode(errors="replace")[:400])
        os._exit(code)

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _writes(arguments):
            path = arguments[0]
            if not isinstance(path, (str, bytes)) or not os.path.realpath(os.fsdecode(path)).startswith(home):
                end(f"forbidden: writing {path!r}", 3)
        elif event.startswith(FORBIDDEN):
            end(f"forbidden: {event}", 3)

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    sys.addaudithook(guard)
    try:
        exec(compile(request["program"], "program.py", "exec", dont_inherit=True), {"__name__": "program"})
    except BaseException as error:  # SystemExit too
        end(type(error).__name__, 1)
    end(request["word"], 0)


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = (*arguments, None, None, None)[:3]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


if __name__ == "__main__":
    main()
