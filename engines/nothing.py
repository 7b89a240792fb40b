"""What stands where a pair has no auxiliary: an engine that holds nothing and runs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from engines.base import Engine, EngineSpec, Step
from engines.cache.columns import ColumnCache


class NoEngine(Engine):
    """A cache without layers, so that whoever looks after rows need not ask whether there are two of them."""

    def __init__(self, target: EngineSpec, device: str = "cpu") -> None:
        spec = without_layers(target)
        super().__init__(spec, ColumnCache(spec, device))

    def step(self, step: Step) -> NoReturn:
        raise AssertionError("there is no auxiliary to run")


def without_layers(target: EngineSpec) -> EngineSpec:
    """The description of an engine that takes no memory beside the target's."""
    return replace(target, layers=0)
