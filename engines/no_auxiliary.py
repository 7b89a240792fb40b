"""What stands where a pair has no auxiliary."""

from __future__ import annotations

from typing import NoReturn

from engines.base import Engine, EngineSpec, Step
from engines.cache.columns import ColumnCache


class NoAuxiliary(Engine):
    """A cache without layers, so that whoever looks after rows need not ask whether there are two of them."""

    name, capturable, reads_mask = "none", True, False

    def __init__(self, target: EngineSpec, device: str) -> None:
        super().__init__(target.without_layers, ColumnCache(target.without_layers, device))

    def step(self, step: Step) -> NoReturn:
        raise AssertionError("there is no auxiliary to run")
