"""`model.yaml`: the options of one Triton model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from mtad.errors import InvalidInput, read_text, refused_as
from runtime.config import RuntimeConfig, check_least


@dataclass(frozen=True)
class TritonOptions(RuntimeConfig):
    """Options of one model: how its pair runs, and two of its own. It is one process, so its target is not sharded.

    Attributes:
        pair: pair folder; a relative one starts at the folder of `model.yaml`.
        request_seconds: timeout for a request, waiting included, in seconds, >= 0.001.
    """

    pair: str = ""
    request_seconds: float | int = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pair:
            raise InvalidInput("pair", self.pair, "give the path of a pair folder")
        check_least(self, request_seconds=1e-3)
        if self.tensor_parallel != 1:
            raise InvalidInput("tensor_parallel", self.tensor_parallel, "a Triton model is one process; give 1")


def read_options(file: Path) -> TritonOptions:
    """Read `model.yaml`.

    Raises:
        InvalidInput: it cannot be read, is not a mapping, or an option is wrong.
    """
    text, known = read_text("model.yaml", file), TritonOptions.__dataclass_fields__
    with refused_as("model.yaml", str(file), "not a mapping of options to values"):
        values = dict(yaml.safe_load(text))
    for name in values.keys() - known.keys():
        raise InvalidInput(name, values[name], f"unknown option; known: {', '.join(sorted(known))}")
    return TritonOptions(**values)
