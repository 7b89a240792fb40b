"""The rules of multi-token assisted decoding (arXiv 2407.09722), and the parameters that a request may set.

Nothing here knows an engine, a clock or a request in flight, and what is drawn is drawn with numbers that are given.
numba compiles the functions of a row's arrays; `mtad.device` has those that a GPU captures, for all rows at once.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"
"""Written here and nowhere else, so that a checkout that is not installed knows it."""

# The toolkit talks to nobody. These libraries would, and read their variables when they are imported, which is after
# this package: all others of the toolkit import it. Who sets a variable otherwise is heeded.
for _name, _value in (
    ("ORT_DISABLE_TELEMETRY", "1"),  # ONNX Runtime 1.31 writes a device id and sends events to its maker
    ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ.setdefault(_name, _value)

from mtad.errors import InvalidInput  # noqa: E402
from mtad.params import DecodingParams  # noqa: E402

if TYPE_CHECKING:
    from runtime.async_llm import AsyncLLM
    from runtime.config import RuntimeConfig
    from runtime.llm import LLM

__all__ = ["LLM", "AsyncLLM", "DecodingParams", "InvalidInput", "RuntimeConfig"]


_ABOVE = {"LLM": "runtime.llm", "AsyncLLM": "runtime.async_llm", "RuntimeConfig": "runtime.config"}


def __getattr__(name: str) -> object:
    """What programs begin with lies in `runtime`: the one import that points up, made when the name is used."""
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ABOVE[name]), name)
