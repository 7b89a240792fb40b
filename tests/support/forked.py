"""Scripts in processes that have imported the exporter already: each is a fork of one server."""

from __future__ import annotations

import multiprocessing
import sys

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["export.pair"])


def run_script(script: str, *arguments: object) -> int:
    """Run a script in a process of its own; return its exit code: of what a signal ended, minus the signal."""
    process = _CONTEXT.Process(target=_execute, args=(script, [str(argument) for argument in arguments]))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _execute(script: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    exec(script, {"__name__": "__main__"})
