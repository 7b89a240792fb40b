"""The decoding rules, compiled before the first test that runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_rules() -> None:
    """Compile the rules, or load what was compiled; one process of a test run compiles, and the others wait for it."""
    from runtime.decoder.host_runner import compile_rules

    compile_rules()


@pytest.fixture(scope="session", autouse=True)
def grammars_get_their_time() -> Iterator[None]:
    """Slow grammars do not give way to other tests: where all cores are taken, they would wait for minutes."""
    from runtime.constraints.trials import Pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool.__init__, "__defaults__", (False,))
        yield
