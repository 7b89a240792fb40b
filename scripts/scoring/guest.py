"""Runs one program within limits it sets for itself; started by `sandbox.py` only, inside the sandbox.

Imports nothing but the standard library: it runs isolated from the environment's packages.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys


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
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    os.close(nowhere)
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    words, code = request["word"], 0
    try:
        exec(compile(request["program"], "program.py", "exec", dont_inherit=True), {"__name__": "program"})
    except BaseException as error:  # SystemExit too
        words, code = type(error).__name__, 1
    os.write(out, words.encode(errors="replace")[:400])
    os._exit(code)


if __name__ == "__main__":
    main()
