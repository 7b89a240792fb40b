"""Command-line options made from a configuration class: names and types from its fields, help from its docstring."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from runtime.config import RuntimeConfig, describe

PLACEMENT = ("device", "threads", "provider", "attention", "graphs")
"""Fields of `RuntimeConfig` that say where the engines run."""

_Target = argparse.ArgumentParser | argparse._ArgumentGroup


def add_options(parser: _Target, config: type, only: Collection[str] = (), but: Collection[str] = ()) -> None:
    """Add an option for each field of a dataclass. Those that are not given leave no trace in the parsed namespace.

    Args:
        parser: a parser, or a group of one.
        config: the dataclass; its docstring describes the fields under "Attributes:".
        only: names of the fields to offer, in this order; by default, all.
        but: names of fields to leave out.
    """
    known, hints, texts = {field.name: field for field in fields(config)}, get_type_hints(config), describe(config)
    for name in only or known:
        if name in but:
            continue
        flag, hint = "--" + name.replace("_", "-"), hints[name]
        help = f"{texts[name]}{_default(known[name])}".replace("%", "%%")
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


def _default(field: Field[Any]) -> str:
    shown = field.default not in (MISSING, None, (), "") and not isinstance(field.default, bool)
    return f" (default: {field.default})" if shown else ""


def _kind(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of a type."""
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
