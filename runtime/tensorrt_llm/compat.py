"""The library, imported when first used, in the release that its caller is written for."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mtad.errors import InvalidInput

WORKER = "1.4.0rc1"
"""The release that the worker is written for."""


def load(name: str, release: str) -> Any:
    """Import a module of the library. Only `release` is accepted: parameters differ between releases.

    Raises:
        InvalidInput: the library is not installed, is another release, or cannot be loaded on this machine.
    """
    found, remedy = installed(), f"pip install tensorrt-llm=={release} from NVIDIA's package index"
    remedy += " (docs/tensorrt-llm.md)"
    if found is not None and found.partition("+")[0] != release:  # a suffix names a build of the same release
        raise InvalidInput("tensorrt-llm", found, f"another release than what this is written for; {remedy}")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        problem = "not installed" if error.name == "tensorrt_llm" else f"{error.name} is missing"
        raise InvalidInput("tensorrt-llm", found, f"{problem}; {remedy}") from error
    except Exception as error:  # its libraries' own: a driver, CUDA or MPI that is not there
        raise InvalidInput("tensorrt-llm", found, f"cannot be loaded on this machine: {error}") from error


def installed() -> str | None:
    """The version that is installed; None for none."""
    try:
        return version("tensorrt-llm")
    except PackageNotFoundError:
        return None
