"""Invariants that tests look at, beside those that a loop checks itself."""

import numpy as np

from engines.cache.paged import EMPTY, OWN, PageCache
from runtime.async_llm import AsyncLLM


def check_page_table(cache: PageCache) -> None:
    """The device's table is the host's."""
    owned = np.arange(cache.page_table.shape[1] - 1) < cache.table.owned[:, None]
    expected = np.where(owned, cache.table.table + OWN, EMPTY)
    assert np.array_equal(cache.page_table[:, :-1].cpu().numpy(), expected), "kernels read another table"


def check_engine(engine: AsyncLLM) -> None:
    """Of an idle or stopped engine."""
    assert engine.llm.loop.scheduler.idle, "not idle"
    assert not engine._choices, "a stream without a request"
    engine.llm.loop.check_integrity()
