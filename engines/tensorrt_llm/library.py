"""The library's plugins, loaded by themselves: a plan needs them and TensorRT, not the Python package."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mtad.errors import InvalidInput

RELEASE = "1.2.1"
"""Of the library, the last one with plans that are maintained; they are built and run by the same."""
PLUGINS, VARIABLE = "libnvinfer_plugin_tensorrt_llm.so", "MTAD_TENSORRT_LLM_LIBS"
"""The library, and the environment's variable with the folder where it and those that it needs are."""


@cache
def load_plugins() -> None:
    """Load and register the plugins, once per process (`tensorrt_llm/plugin/plugin.py`: _load_plugin_lib).

    Raises:
        InvalidInput: they are not there, or cannot be loaded on this machine.
    """
    folder = os.environ.get(VARIABLE)
    if folder is None and (package := find_spec("tensorrt_llm")) and package.submodule_search_locations:
        folder = str(Path(package.submodule_search_locations[0], "libs"))
    if folder is None:
        problem = "not installed, and not set; give the folder tensorrt_llm/libs of the environment that built the plan"
        raise InvalidInput(VARIABLE, None, problem)
    try:
        plugins = ctypes.CDLL(str(Path(folder, PLUGINS)), mode=ctypes.RTLD_GLOBAL)
        register = plugins.initTrtLlmPlugins
    except (OSError, AttributeError) as error:
        raise InvalidInput(VARIABLE, folder, f"{PLUGINS} cannot be loaded from there: {error}") from error
    register.argtypes, register.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_bool
    if not register(None, b"tensorrt_llm"):
        raise InvalidInput(VARIABLE, folder, "its plugins cannot be registered; take those that built the plan")
