"""Blocks on a device with the host's filters, for tests of what is around them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import quick_filters


@pytest.fixture
def quick() -> Iterator[None]:
    with quick_filters.quick_filters():
        yield
