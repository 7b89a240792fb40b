"""Triton's interpreter, as far as it differs from a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def whole_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports late: what chooses the interpreter runs after this file is read, see `tests/conftest.py`."""
    from triton.runtime.interpreter import InterpreterBuilder

    from engines.pytorch import attention
    from tests.support.interpreter import multiply_bfloat16

    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply_bfloat16)
    monkeypatch.setattr(attention, "MEMBERS", 16)  # fewer programs: the interpreter takes 20 ms for one
