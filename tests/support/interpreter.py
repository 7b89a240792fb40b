"""Triton's interpreter, as far as it differs from a GPU. Import it from test files only, see `tests/conftest.py`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

multiply = InterpreterBuilder.create_dot


def multiply_bfloat16(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *more: object) -> TensorHandle:
    """The interpreter's product; it takes bfloat16 for the integers that it keeps them as."""

    def wide(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return multiply(self, wide(a), wide(b), *more)


_patch_lang = interpreter._patch_lang
_patched: set[str] = set()
"""Names of the modules of Triton's language that are replaced for the kernel that runs."""


@cache
def _language(function: Any) -> frozenset[str]:
    """Names of the modules of Triton's language that a function sees."""
    return frozenset(value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core)


def patch_once(function: Any) -> Any:
    """What the interpreter does to its language before each call of a function, done before a kernel's first alone.

    It looks through all of the language, which takes longer than most calls.
    """
    wanted = _language(function)
    if wanted <= _patched:
        return interpreter._LangPatchScope()
    scope = _patch_lang(function)
    if not _patched:  # the kernel itself; the functions that it calls are never restored
        restore = scope.restore

        def end() -> None:
            _patched.clear()
            restore()

        scope.restore = end
    _patched.update(wanted)
    return scope
