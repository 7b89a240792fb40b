"""`model.yaml`: the options of one Triton model. Those of the engine are `runtime.LLM`'s, one to one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from mtad.errors import InvalidInput
from runtime.llm import LLM
from runtime.triton.tensors import CONVENTIONS

ENGINE = {
    name: parameter.default
    for name, parameter in inspect.signature(LLM.__init__).parameters.items()
    if name not in ("self", "pair", "costs", "record", "recorder", "tensor_parallel")
}
"""Options of `runtime.LLM` with their defaults. No divided target: a model of Triton is one process."""

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class TritonOptions:
    """Options of one model.

    Attributes:
        pair: pair folder; a relative one starts at the folder of `model.yaml`.
        convention: names and shapes of the tensors, a key of `CONVENTIONS`.
        request_seconds: after which a request is cancelled, waiting included, > 0.
        log_level: least severe message that is logged.
        engine: options of `runtime.LLM`.
    """

    pair: str
    convention: str = "bls"
    request_seconds: float = 600.0
    log_level: str = "info"
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.pair, str) or not self.pair:
            raise InvalidInput("pair", self.pair, "give the path of a pair folder")
        for name, known in (("convention", tuple(CONVENTIONS)), ("log_level", LEVELS)):
            if getattr(self, name) not in known:
                raise InvalidInput(name, getattr(self, name), f"choose one of {', '.join(known)}")
        seconds = self.request_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise InvalidInput("request_seconds", seconds, "give a positive number")
        hints = get_type_hints(LLM.__init__)
        for name, value in self.engine.items():
            allowed = get_args(hints[name]) or (hints[name],)
            if not any(type(value) is one for one in allowed):
                words = " or ".join("null" if one is type(None) else one.__name__ for one in allowed)
                raise InvalidInput(name, value, f"give {words}")

    def to_dict(self) -> dict[str, Any]:
        """What `model.yaml` says, every option of the engine included."""
        own = {name: value for name, value in asdict(self).items() if name != "engine"}
        return {**own, **ENGINE, **self.engine}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TritonOptions:
        """Options from plain values; an unknown one is refused by name.

        Raises:
            InvalidInput: an option is unknown, missing or unusable.
        """
        own = {name for name in cls.__dataclass_fields__ if name != "engine"}
        for name in values:
            if name not in own and name not in ENGINE:
                raise InvalidInput(name, values[name], f"unknown; known: {', '.join(sorted(own | set(ENGINE)))}")
        if "pair" not in values:
            raise InvalidInput("pair", None, "give the path of a pair folder")
        engine = {name: values[name] for name in ENGINE if name in values}
        return cls(**{name: values[name] for name in own if name in values}, engine=engine)


def read_options(file: Path) -> TritonOptions:
    """Read `model.yaml`.

    Raises:
        InvalidInput: it cannot be read, is not a mapping, or an option is wrong.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput("model.yaml", str(file), f"cannot be read: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InvalidInput("model.yaml", str(file), "not a mapping of options to values")
    return TritonOptions.from_dict(values)
