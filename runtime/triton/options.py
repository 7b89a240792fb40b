"""`model.yaml`: the options of one Triton model. Those of the engine are the fields of `RuntimeConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mtad.errors import InvalidInput, read_text, refused_as
from runtime.config import RuntimeConfig, check_least


@dataclass(frozen=True)
class TritonOptions:
    """Options of one model.

    Attributes:
        pair: pair folder; a relative one starts at the folder of `model.yaml`.
        request_seconds: timeout for a request, waiting included, in seconds, >= 0.001.
        engine: how the pair runs. The target is not sharded: a model of Triton is one process.
    """

    pair: str
    request_seconds: float = 600.0
    engine: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.pair, str) or not self.pair:
            raise InvalidInput("pair", self.pair, "give the path of a pair folder")
        check_least(self, request_seconds=1e-3)
        if self.engine.tensor_parallel != 1:
            raise InvalidInput("tensor_parallel", self.engine.tensor_parallel, "a Triton model is one process; give 1")


def read_options(file: Path) -> TritonOptions:
    """Read `model.yaml`.

    Raises:
        InvalidInput: it cannot be read, is not a mapping, or an option is wrong.
    """
    text, own = read_text("model.yaml", file), TritonOptions.__dataclass_fields__.keys() - {"engine"}
    with refused_as("model.yaml", str(file), "not a mapping of options to values"):
        values = dict(yaml.safe_load(text))
    engine = {name: value for name, value in values.items() if name not in own}
    for name in engine.keys() - RuntimeConfig.__dataclass_fields__.keys():
        known = ", ".join(sorted(RuntimeConfig.__dataclass_fields__))
        raise InvalidInput(name, values[name], f"unknown option; known: {known}")
    asked = {"pair": None, **{name: values[name] for name in own if name in values}}
    return TritonOptions(**asked, engine=RuntimeConfig(**engine))
