"""The labelled settings that can be compared, and how the command line asks for them.

`TABLE` has every method of `mtad.methods.METHODS` under its own name, with its defaults, and a few more. A label may be
followed by changes, `mtad:accept_threshold=0.3:beam_width=2`, and is then shown with them. Of several values for one
parameter the first of these counts: the changes; the table; what is given for all settings; the pair's defaults
(`mtad tune` writes them), those of drafting and accepting for the method they are for only; `DecodingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mtad.errors import InvalidInput
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.tuning.search import GRID

TABLE: dict[str, dict[str, Any]] = {name: {"method": name} for name in METHODS} | {
    "greedy": {"method": "sample", "temperature": 0.0},
}


@dataclass(frozen=True)
class Asked:
    """One entry of the command line: a label of the table, and changes."""

    base: str
    changes: Mapping[str, Any]

    @property
    def label(self) -> str:
        """In tables."""
        return " ".join([self.base, *(f"{name}={_short(value)}" for name, value in self.changes.items())])


def parse(names: Sequence[str]) -> list[Asked]:
    """Entries of the command line.

    Raises:
        InvalidInput: a label or field is unknown, or a label is given twice.
    """
    found = []
    for name in names:
        base, *parts = name.split(":")
        if base not in TABLE:
            raise InvalidInput("methods", base, f"unknown; choose from {', '.join(TABLE)}")
        found.append(Asked(base, dict(_change(part) for part in parts)))
    labels = [one.label for one in found]
    if len(set(labels)) < len(labels):
        raise InvalidInput("methods", ",".join(labels), "a setting is given twice")
    return found


def resolve(asked: Asked, defaults: DecodingParams, common: Mapping[str, Any]) -> DecodingParams:
    """Parameters of an entry for one set.

    Args:
        asked: the entry.
        defaults: the pair's.
        common: for all settings: `max_tokens`, `stop` and what the user gives for all.

    Raises:
        InvalidInput: a value is not usable.
    """
    row = TABLE[asked.base]
    own = defaults if defaults.method == row["method"] else undrafted(defaults)
    values = {**common, **row, **asked.changes}
    return DecodingParams.from_dict(values, own)


def undrafted(defaults: DecodingParams) -> DecodingParams:
    """`defaults` with the standard values of everything that belongs to their method: what is true for any decoder."""
    plain = DecodingParams()
    return replace(defaults, method=plain.method, **{name: getattr(plain, name) for name in (*GRID, "speculation")})


def number(text: str) -> int | float | str:
    """A value of the command line: an integer, a number, or else text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _change(part: str) -> tuple[str, Any]:
    name, equals, value = part.partition("=")
    if not equals or name not in {field.name for field in fields(DecodingParams)} - {"method", "seed"}:
        raise InvalidInput("methods", part, "give changes as field=value, with a decoding parameter")
    return name, number(value)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
