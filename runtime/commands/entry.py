"""Argument parser and exit codes of all commands."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from mtad.errors import Failed, InvalidInput


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, as every other bad input's.

    Options are not abbreviated, and may stand between the arguments. `--config FILE` reads options from a YAML
    mapping; the command line goes before it.
    """

    current: ClassVar[Parser | None] = None
    """The parser of the command that runs in this process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        Parser.current = self
        self.add_argument("--config", type=Path, metavar="FILE", help="YAML file with any of these options, by name")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The options of the command line over those of the file, if one is named."""
        parsed = self.parse_intermixed_args(args, namespace)
        if parsed.config is None:
            return parsed
        self.set_defaults(**self._read(parsed.config))
        return self.parse_intermixed_args(args, namespace)

    def _read(self, path: Path) -> dict[str, Any]:
        """Options of a YAML file, by the name that the parsed namespace has."""
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InvalidInput("config", str(path), f"cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise InvalidInput("config", str(path), "not a mapping of options to values")
        known = {action.dest: action for action in self._actions if action.option_strings}
        found = {str(name).replace("-", "_"): value for name, value in values.items()}
        for name in found:
            if name not in known:
                raise InvalidInput(f"config {name}", found[name], f"unknown option; see {self.prog} --help")
        return found

    def flag(self, field: str) -> str:
        """The option that sets a field; the field's own name where there is none."""
        for action in self._actions:
            if action.option_strings and field in (action.dest, *(name.lstrip("-") for name in action.option_strings)):
                return action.option_strings[-1]
        return field

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
            field = Parser.current.flag(error.field) if Parser.current else error.field
            problem = (
                f"{field} = {error.value!r}: {error.problem}"
                if error.value is not None
                else f"{field}: {error.problem}"
            )
            print(f"{Path(sys.argv[0]).stem}: error: {' '.join(problem.split())}", file=sys.stderr)
            sys.exit(2)
        except Failed as error:
            print(f"{Path(sys.argv[0]).stem}: failed: {error}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)

    return run
