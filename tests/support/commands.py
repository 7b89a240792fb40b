"""Commands of `mtad`, run in a test's process by the fixture `run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Outcome(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    out: str
    err: str


OPTIONS = ("--max-tokens", "8", "--seed", "3", "--ignore-eos", "--threads", "1")
"""Of short answers that are the same every time."""
Run = Callable[..., Outcome]
"""Takes a command, such as `generate`, its arguments, and as `stdin` what it reads."""


def assert_refused(outcome: Outcome, name: str, words: str) -> None:
    """Bad input is one line on standard error and exit code 2."""
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith(f"mtad {name}: error: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1, outcome.err
    assert words in outcome.err
