"""Argument parser, options and exit codes of all commands.

Options are made from a configuration class: names and types from its fields, help from its docstring.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from mtad.errors import Failed, InvalidInput
from runtime.config import RuntimeConfig, describe, read_mapping


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
        values = read_mapping("config", path)
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
        if unknown := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            flags = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[1], flags, n=1)
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
            field = Parser.current.flag(error.field) if Parser.current else error.field
            problem = str(InvalidInput(field, error.value, error.problem))
            print(f"{Path(sys.argv[0]).stem}: error: {' '.join(problem.split())}", file=sys.stderr)
            sys.exit(2)
        except Failed as error:
            print(f"{Path(sys.argv[0]).stem}: failed: {error}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)

    return run


PLACEMENT = ("device", "threads", "provider", "compute", "kv_cache", "attention", "graphs")
"""Fields of `RuntimeConfig` that say where the engines run."""

_Target = argparse.ArgumentParser | argparse._ArgumentGroup


def add_options(parser: _Target, config: type, only: Collection[str] = (), but: Collection[str] = ()) -> None:
    """Add an option for each field of a dataclass. Those that are not given leave no trace in the parsed namespace.

    Args:
        config: the dataclass; its docstring describes the fields under "Attributes:".
        only: names of the fields to offer, in this order; by default, all.
    """
    known, hints, texts = {field.name: field for field in fields(config)}, get_type_hints(config), describe(config)
    for name in only or known:
        if name in but:
            continue
        flag, hint = "--" + name.replace("_", "-"), hints[name]
        default, help = known[name].default, texts[name].replace("%", "%%")
        if default not in (MISSING, None, (), "") and not isinstance(default, bool):
            help += f" (default: {default})"
        if hint is bool:
            on = bool(known[name].default)
            if on:
                help += " (default: yes)"
            action = argparse.BooleanOptionalAction if on else "store_true"
            parser.add_argument(flag, dest=name, action=action, default=argparse.SUPPRESS, help=help)
        else:
            parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=help, **_kind(hint))


def given_options(parsed: argparse.Namespace, config: type, only: Collection[str] = ()) -> dict[str, Any]:
    """The options of `config`, or of the fields `only`, that the command line gave, by field."""
    names = only or [field.name for field in fields(config)]
    return {name: getattr(parsed, name) for name in names if hasattr(parsed, name)}


def add_placement(parser: _Target) -> None:
    """Add the options that say where the engines run."""
    add_options(parser, RuntimeConfig, only=PLACEMENT)
    parser.set_defaults(**{name: getattr(RuntimeConfig, name) for name in PLACEMENT})


def placed_config(parsed: argparse.Namespace, **others: Any) -> RuntimeConfig:
    """A configuration of `others`, placed where the command line says."""
    return RuntimeConfig(**others, **given_options(parsed, RuntimeConfig, PLACEMENT))


def _kind(hint: Any) -> dict[str, Any]:
    options = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    options = tuple(one for one in options if one is not type(None))
    if tuple[str, ...] in options:
        return {"action": "append", "metavar": "TEXT"}
    (first, *_) = options
    if get_origin(first) is Literal:
        return {"choices": get_args(first)}
    if get_origin(first) is tuple:
        return {"type": _integers, "metavar": "N,N,..."}
    if get_origin(first) is Mapping:
        return {"type": json_object, "metavar": "JSON"}
    kind: Callable[[str], Any] = str if str in options else first
    return {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}  # type: ignore[index]


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not integers such as 2,2,1") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, as the type of an option."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"5": -100}}')
    return value
