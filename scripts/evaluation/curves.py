"""Figures against one parameter: the settings a curve needs, and its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from scripts.evaluation.figures import REFERENCES
from scripts.evaluation.settings import TABLE, Asked, number


@dataclass(frozen=True)
class Curve:
    """One parameter, and the values it takes for every setting."""

    parameter: str
    values: tuple[Any, ...]

    @classmethod
    def of(cls, text: str) -> Curve:
        """From `parameter=value,value,..`.

        Raises:
            InvalidInput: not of that form, or not a number of `DecodingParams`.
        """
        name, _, values = text.partition("=")
        plain = getattr(DecodingParams(), name, None)
        found = tuple(number(value) for value in values.split(",") if value)
        own = name in ("accept_threshold", "draft_confidence")  # None: the method's own
        if not own and (not isinstance(plain, (int, float)) or isinstance(plain, bool)):
            raise InvalidInput("curve", text, "give a number of DecodingParams, as in accept_threshold=0.1,0.3,0.5")
        if len(set(found)) < 2 or len(set(found)) < len(found):
            raise InvalidInput("curve", text, "give two or more different values")
        for value in found:
            DecodingParams.from_dict({name: value})
        return cls(name, found)

    def used_by(self, one: Asked) -> bool:
        """Whether the parameter does anything for a setting, and is not fixed by it."""
        params = DecodingParams.from_dict(dict(TABLE[one.base]))
        return self.parameter not in one.changes and params.spec.uses(self.parameter)

    def at(self, one: Asked, value: Any) -> Asked:
        """A setting at one of the values."""
        return Asked(one.base, {**one.changes, self.parameter: value})


def settings(asked: Sequence[Asked] | None, curves: Sequence[Curve]) -> tuple[list[Asked], list[Asked]]:
    """Settings that curves are drawn of, and all that have to be measured for them, the references first.

    Args:
        asked: what the user asked for; None: all of the table that use every one of the parameters.
        curves: at least one.

    Raises:
        InvalidInput: a setting does not use a parameter, or none is left.
    """
    chosen = [one for one in asked or (Asked(base, {}) for base in TABLE) if one.label not in REFERENCES]
    for curve in curves:
        for one in chosen if asked else ():
            if not curve.used_by(one):
                problem = f"{one.label} does not use it, or has it fixed; leave it out of --methods"
                raise InvalidInput(f"curve {curve.parameter}", curve.values, problem)
        chosen = [one for one in chosen if curve.used_by(one)]
    if not chosen:
        raise InvalidInput("methods", [one.label for one in asked or ()], "give settings that curves are drawn of")
    points = [curve.at(one, value) for curve in curves for one in chosen for value in curve.values]
    unique = {one.label: one for one in [*(Asked(label, {}) for label in REFERENCES), *points]}
    return chosen, list(unique.values())


def points(curve: Curve, chosen: Sequence[Asked], name: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """One curve of a set: a point a setting and value, and the references' figures.

    Args:
        curve: the parameter.
        chosen: the settings.
        name: the set's.
        rows: its figures by label.
    """
    return {
        "set": name,
        "parameter": curve.parameter,
        "points": [
            {"method": one.label, "value": value, "figures": rows[curve.at(one, value).label]}
            for one in chosen
            for value in curve.values
        ],
        "references": {label: rows[label] for label in REFERENCES},
    }
