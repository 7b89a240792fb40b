"""The one error a user's input can cause (it names the field, the value and the remedy), and how commands report it."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class InvalidInput(ValueError):
    """A value given by a user is not usable.

    Raised before any work is done. Commands print it as one line and exit with code 2.

    Args:
        field: name of the option, request field or file that is wrong.
        value: the value that was given.
        problem: what is wrong with it, and what to give instead.
    """

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field, self.value, self.problem = field, value, problem
        super().__init__(f"{field} = {value!r}: {problem}")


class CapacityExceeded(InvalidInput):
    """A request can never fit the engines it was sent to."""


class Failed(RuntimeError):
    """Something broke that no other value would mend. Commands print it as one line and exit with code 1."""


class VerificationFailed(Failed):
    """An engine does not compute what its checkpoint computes."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, as every other bad input's."""

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def command(main: Callable[[], None]) -> Callable[[], None]:
    """A command's entry point: bad input becomes one line on stderr and exit code 2, never a traceback.

    What broke while it ran (`Failed`) is one line and exit code 1.
    """

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except InvalidInput as error:
            name = Path(sys.argv[0]).stem
            print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(2)
        except Failed as error:
            print(f"{Path(sys.argv[0]).stem}: failed: {error}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)

    return run
