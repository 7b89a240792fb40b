"""Argument parser, options and exit codes of all commands.

Options are made from a configuration class: names and types from its fields, help from its docstring.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from mtad.errors import Failed, InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.config import describe

COMMON = {"help", "help_all", "file", "json", "system", "chat_template", "auxiliary", "device", "memory"}
COMMON |= {"method", "accept_threshold", "temperature", "seed", "max_tokens"}
COMMON |= {"host", "port", "model", "api_key", "log_level", "replicas"}
"""Options that most people use."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, as every other bad input's.

    Options are not abbreviated, and may stand between the arguments.

    Args:
        brief: whether `--help` shows the options of `COMMON` alone, and `--help-all` all.
    """

    current: ClassVar[Parser | None] = None
    """The parser of the command that runs in this process."""

    def __init__(self, brief: bool = False, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        Parser.current, self._brief = self, brief
        if brief:
            self.add_argument("--help-all", action="help", help="show all options; --help shows the common ones")

    def print_help(self, file: Any = None) -> None:
        for action in self._actions if self._brief and "--help-all" not in sys.argv else ():
            if action.option_strings and action.dest not in COMMON:
                action.help = argparse.SUPPRESS
        super().print_help(file)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in sys.argv if args is None else args:
            if any("\udc80" <= character <= "\udcff" for character in word):
                self.error(f"{word!a} is not UTF-8")
        return self.parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line and exit with code 2."""
        if unknown := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            near = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
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
            flag = "--" + error.field.replace("_", "-")
            known = Parser.current is not None and flag in Parser.current._option_string_actions
            problem = str(InvalidInput(flag if known else error.field, error.value, error.problem))
            print(f"{Path(sys.argv[0]).stem}: error: {' '.join(problem.split())}", file=sys.stderr)
            sys.exit(2)
        except BrokenPipeError:
            raise  # a reader that has gone away; `mtad` ends quietly
        except (Failed, OSError) as error:
            print(f"{Path(sys.argv[0]).stem}: failed: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            print(f"{Path(sys.argv[0]).stem}: interrupted", file=sys.stderr)
            sys.exit(130)

    return run


PLACEMENT = ("device", "threads", "provider", "compute", "kv_cache", "attention", "graphs")
"""Fields of `RuntimeConfig` that say where the engines run."""


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, as the type of an option."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a JSON object")


def _length(text: str) -> int | str:
    """An integer or auto; the configuration class refuses all else."""
    return int(text) if text.isdecimal() else text


_KINDS: dict[str, dict[str, Any]] = {
    "bool": {"action": argparse.BooleanOptionalAction},
    "int": {"type": int, "metavar": "N"},
    "int | Literal['auto']": {"type": _length, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "float | int": {"type": float, "metavar": "X"},
    "tuple[int, ...]": {"type": lambda text: tuple(map(_length, text.split(","))), "metavar": "N,N,..."},
    "tuple[str, ...]": {"action": "append", "metavar": "TEXT"},
    "str | tuple[str, ...]": {"action": "append", "metavar": "TEXT"},
    "Path": {"type": Path, "metavar": "FILE"},
    "Mapping[int, float]": {"type": json_object, "metavar": "JSON"},
}
"""How an option of each type is read, by its annotation; all others are text."""


def add_options(parser: argparse._ActionsContainer, config: type, only: Collection[str] = ()) -> None:
    """Add an option for each field of a dataclass. Those that are not given leave no trace in the parsed namespace.

    Args:
        config: the dataclass; its docstring describes the fields under "Attributes:".
        only: names of the fields to offer; by default, all.
    """
    texts = describe(config)
    for field in fields(config):
        if only and field.name not in only:
            continue
        help = texts[field.name].replace("%", "%%")
        if field.default not in (MISSING, None, ()):
            help += f" (default: {field.default})"
        kind = _KINDS.get(field.type.removesuffix(" | None"), {"metavar": "TEXT"})
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS, help=help, **kind)


def given_options(parsed: argparse.Namespace, config: type, only: Collection[str] = ()) -> dict[str, Any]:
    """The options of `config`, or of the fields `only`, that the command line gave, by field."""
    names = only or [field.name for field in fields(config)]
    return {name: getattr(parsed, name) for name in names if hasattr(parsed, name)}


DECODING = "lossless: these change the speed alone", "lossy: for methods that are not lossless", "output"
"""Groups of the decoding parameters."""


def add_decoding(parser: Parser, but: Collection[str] = ()) -> None:
    """Add the decoding parameters, but for those named, in the groups of `DECODING`."""

    def group(name: str) -> int:
        if name != "method" and METHODS["sample"].uses(name):
            return 2
        return 0 if any(one.uses(name) for one in METHODS.values() if one.lossless) else 1

    names = [field.name for field in fields(DecodingParams) if field.name not in but]
    for number, title in enumerate(DECODING):
        add_options(parser.add_argument_group(title), DecodingParams, [name for name in names if group(name) == number])
