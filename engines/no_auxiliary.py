"""Pairs without an auxiliary: what stands in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from engines.base import Engine, EngineSpec, Step
from engines.cache.columns import ColumnCache
from mtad.errors import InvalidInput


class NoAuxiliary(Engine):
    """A cache without layers, so that whoever looks after rows need not ask whether there are two of them."""

    name = "none"

    def __init__(self, target: EngineSpec, device: str) -> None:
        super().__init__(target.without_layers, ColumnCache(target.without_layers, device))

    def step(self, step: Step) -> NoReturn:
        raise AssertionError("there is no auxiliary to run")


def engine_names(values: Mapping[str, Any]) -> list[str]:
    """The engine folders of a pair, by what its `pair.json` says; one that does not say it has both.

    Raises:
        InvalidInput: they are not a target, with or without an auxiliary.
    """
    names = values.get("engines", ["target", "auxiliary"])
    if names not in (["target"], ["target", "auxiliary"]):
        raise InvalidInput("pair.json engines", names, "give target, or target and auxiliary")
    return list(names)
