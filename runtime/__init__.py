"""Requests to tokens: the decoding loop over two engines.

The names below are loaded when first used, so that the scheduler and the request can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtad.params import DecodingParams
    from runtime.llm import LLM
    from runtime.request import Result

__all__ = ["LLM", "DecodingParams", "Result"]

_HOME = {"LLM": "runtime.llm", "DecodingParams": "mtad.params", "Result": "runtime.request"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
