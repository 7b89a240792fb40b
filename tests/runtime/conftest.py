"""The decoding rules, compiled before the first test that runs them."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_rules() -> None:
    """Compile the rules, or load what was compiled; one process of a test run compiles, and the others wait for it."""
    from runtime.decoder.host_runner import compile_rules

    compile_rules()
