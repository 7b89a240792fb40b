"""Argument parser and exit codes of all commands."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mtad.errors import Failed, InvalidInput


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
