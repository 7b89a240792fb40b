"""Invariants of the bookkeeping, for tests to look at between two steps."""

from collections.abc import Sequence

import numpy as np

from engines.base import KV_PAGE
from engines.cache.page_table import PagedPrefixCache, Pages, PageTable
from engines.cache.paged import EMPTY, OWN, PageCache
from engines.cache.prefix import PrefixCache
from runtime.async_llm import AsyncLLM
from runtime.decoder.kv_cache import KvCaches
from runtime.decoder.translated import TranslatedPrefixes
from runtime.loop import DecodingLoop
from runtime.scheduler.scheduler import Scheduler


def check_page_table(cache: PageCache) -> None:
    """The device's table is the host's."""
    owned = np.arange(cache.page_table.shape[1] - 1) < cache.table.owned[:, None]
    expected = np.where(owned, cache.table.table + OWN, EMPTY)
    assert np.array_equal(cache.page_table[:, :-1].cpu().numpy(), expected), "kernels read another table"


def check_pool(pages: Pages, held: Sequence[int]) -> None:
    """`held`, what all holders hold together, is what the pool counts."""
    assert np.array_equal(np.bincount(list(held), minlength=len(pages.users)), pages.users), "a page is lost"
    assert sorted(pages._free) == np.flatnonzero(pages.users == 0).tolist(), "a page is free and held, or neither"


def check_pages(table: PageTable, others: Sequence[int] = ()) -> None:
    """`others` are pages that kept prefixes hold."""
    rows = [page for row, owned in enumerate(table.owned) for page in table.table[row, :owned].tolist()]
    check_pool(table.pages, [*rows, *others])


def check_prefixes(kept: PrefixCache) -> None:
    if isinstance(kept, TranslatedPrefixes):
        check_prefixes(kept._own)
        return
    used = list(kept._slots.values())
    assert sorted(used + kept._free) == list(range(kept._count)), "a page is lost or in two places"
    order = {slot: age for age, slot in enumerate(used)}
    for (parent, tokens), slot in kept._slots.items():
        assert len(tokens) == KV_PAGE
        assert parent < 0 or order[parent] > order[slot], "a page would outlive the one it follows"
    if isinstance(kept, PagedPrefixCache):
        check_pages(kept._table, [page for pages in kept._pages.values() for page in pages])


def check_caches(caches: KvCaches) -> None:
    for kept in caches.prefixes:
        check_prefixes(kept)


def check_scheduler(scheduler: Scheduler) -> None:
    assert len(scheduler.holders) <= scheduler.rows, "more requests than rows"
    assert scheduler._count() <= 2 * scheduler.max_waiting + scheduler.rows, "more wait than were let in"
    known = [request.id for request in (*scheduler.holders, *scheduler.waiting)]
    assert len(set(known)) == len(known), "a request is in two places"
    with scheduler._lock:  # others may submit
        assert all(scheduler._queues.values()), "an empty queue"
    for request in scheduler.holders:
        assert request.finish_reason is None, "a finished request holds a row"
        assert request.committed <= scheduler.room_for_tokens
    for request in scheduler.running:
        assert request.target_cached == request.committed - 1, "the target's cache is not the request's"
        assert 0 <= request.auxiliary_cached <= request.committed - 1
        p = request.params
        both_draft = p.uses_model and p.thinking.uses_model
        if both_draft and not p.looks_up and not p.follows_load:
            assert request.auxiliary_cached >= request.committed - 2, "the auxiliary's cache lags"


def check_loop(loop: DecodingLoop) -> None:
    check_scheduler(loop.scheduler)
    assert all(request.detokenizer for request in loop.scheduler.running), "a request runs that has not begun"
    check_caches(loop.caches)


def check_engine(engine: AsyncLLM) -> None:
    """Of an idle or stopped engine."""
    assert engine.llm.loop.scheduler.idle, "not idle"
    check_loop(engine.llm.loop)
