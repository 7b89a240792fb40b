"""Requests to tokens: the decoding loop over two engines.

The names below are loaded when first used, so that the scheduler and the request can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import mtad  # noqa: F401 - switches telemetry off, before a library that has some is imported

if TYPE_CHECKING:
    from mtad.params import DecodingParams
    from runtime.async_llm import AsyncLLM
    from runtime.config import RuntimeConfig
    from runtime.llm import LLM

__all__ = ["LLM", "AsyncLLM", "DecodingParams", "RuntimeConfig"]

_HOME = {
    "LLM": "runtime.llm",
    "AsyncLLM": "runtime.async_llm",
    "DecodingParams": "mtad.params",
    "RuntimeConfig": "runtime.config",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
