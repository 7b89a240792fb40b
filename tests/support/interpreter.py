"""Triton's interpreter, as far as it differs from a GPU. Import it from test files only, see `tests/conftest.py`."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

multiply = InterpreterBuilder.create_dot


def multiply_bfloat16(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *more: object) -> TensorHandle:
    """The interpreter's product; it takes bfloat16 for the integers that it keeps them as."""

    def wide(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return multiply(self, wide(a), wide(b), *more)


def topk(x: tl.tensor, k: int) -> tl.tensor:
    """Triton's own compares one pair of entries after the other in Python."""
    largest = np.sort(x.handle.data, axis=-1)[..., : -int(k) - 1 : -1]
    return tl.tensor(TensorHandle(largest, x.dtype.scalar), tl.block_type(x.dtype.scalar, list(largest.shape)))
