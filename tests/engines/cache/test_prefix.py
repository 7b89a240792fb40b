"""Kept prefixes: what is found is exactly what was stored, and tokens do not change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engines.base import KV_PAGE
from engines.cache.columns import ColumnCache, ColumnPrefixCache
from mtad import LLM, DecodingParams
from tests.support.integrity import check_prefixes
from tests.support.mock_engine import mock_spec
from tests.support.waiting import own

BASE = DecodingParams(max_tokens=12, ignore_eos=True, seed=5)


def filled(tokens: int, rows: int = 3, capacity: int = 512) -> ColumnPrefixCache:
    return ColumnPrefixCache(ColumnCache(replace(mock_spec(rows, capacity), layers=2)), tokens)


def write(cache: ColumnPrefixCache, row: int, tokens: list[int]) -> None:
    """Make `row` hold something that depends on every token up to each column."""
    for column, value in enumerate(expected(tokens)):
        cache._cache.kv[:, :, row, :, column] = value


def expected(tokens: list[int]) -> list[float]:
    total, values = 0, []
    for token in tokens:
        total = total * 31 % 100_003 + token
        values.append(float(total))
    return values


def test_whole_blocks_come_back_and_nothing_else() -> None:
    cache = filled(512)
    tokens = list(range(150))
    write(cache, 0, tokens)
    cache.store(0, tokens)
    assert cache.restore(1, [*tokens[:140], 7, 7]) == 128
    assert cache._cache.kv[0, 0, 1, 0, :128, 0].tolist() == expected(tokens)[:128]
    assert not cache._cache.kv[:, :, 1, :, 128:].any()
    assert cache.restore(2, [1, *tokens]) == 0
    assert cache.restore(2, tokens[:63]) == 0
    assert not cache._cache.kv[:, :, 2].any()
    check_prefixes(cache)


@pytest.mark.parametrize("stored", [0, 2])
def test_a_page_that_could_not_be_stored_is_not_lost(stored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tokens = filled(512), list(range(200))
    with monkeypatch.context() as patch:
        saves = iter([cache.save] * stored)
        patch.setattr(cache, "save", lambda *given: next(saves, broken)(*given))
        with pytest.raises(OSError, match="broken"):
            cache.store(0, tokens)
    check_prefixes(cache)
    cache.store(0, tokens)
    assert cache.restore(1, tokens) == 192


def broken(*arguments: object) -> None:
    raise OSError("broken")


def test_columns_that_are_right_already_are_left_alone() -> None:
    cache = filled(512)
    tokens = list(range(150))
    write(cache, 0, tokens)
    cache.store(0, tokens)
    assert cache.restore(1, tokens, start=70) == 128
    assert not cache._cache.kv[:, :, 1, :, :64].any()
    assert cache._cache.kv[0, 0, 1, 0, 64:128, 0].tolist() == expected(tokens)[64:128]
    assert cache.restore(1, tokens, start=140) == 140


def test_the_least_recently_used_prefix_goes_first() -> None:
    cache = filled(2 * KV_PAGE)
    first, second, third = ([n] * KV_PAGE for n in (1, 2, 3))
    cache.store(0, first)
    cache.store(0, second)
    assert cache.restore(1, first) == KV_PAGE
    cache.store(0, third)
    assert [cache.restore(1, tokens) for tokens in (first, second, third)] == [KV_PAGE, 0, KV_PAGE]


@pytest.mark.parametrize("tokens", [0, 63])
def test_a_cache_without_room_keeps_nothing(tokens: int) -> None:
    cache = filled(tokens)
    cache.store(0, list(range(200)))
    assert cache.restore(1, list(range(200))) == 0
    assert cache._pool.nbytes == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_whatever_is_stored_and_evicted_what_is_found_is_right(seed: int) -> None:
    chance = random.Random(seed)
    cache = filled(KV_PAGE * chance.randint(1, 7))
    known: list[list[int]] = [[]]
    hits = 0
    for _ in range(120):
        base = chance.choice(known)
        tokens = base[: chance.randrange(len(base) + 1)] + [chance.randrange(3)] * chance.randrange(1, 300)
        tokens = tokens[:500]
        found = cache.restore(1, tokens)
        assert found % KV_PAGE == 0
        assert cache._cache.kv[0, 0, 1, 0, :found, 0].tolist() == expected(tokens)[:found]
        hits += found > 0
        write(cache, 0, tokens)
        cache.store(0, tokens)
        check_prefixes(cache)
        known = [*known[-10:], tokens]
    assert hits > 5


@pytest.mark.parametrize("method", ["sample", "mmtad"])
def test_tokens_are_the_same_with_and_without_kept_prefixes(plain: LLM, method: str) -> None:
    keeping = own(plain)
    forgetting = own(plain, prefix_tokens=0)
    shared = "You answer questions about databases with one SQL query and nothing else. " * 2
    prompts = [shared + end for end in ("How many singers?", "List names.", "How many singers are there?")]
    params = replace(BASE, method=method)
    expected = [forgetting.generate(prompt, params)[0] for prompt in prompts]
    reusing = [keeping.generate(prompt, params)[0] for prompt in prompts]
    assert [r.token_ids for r in reusing] == [r.token_ids for r in expected]
    assert [r.logprobs for r in reusing] == [r.logprobs for r in expected]
    assert [r.statistics.reused_tokens for r in expected] == [0, 0, 0]
    assert reusing[0].statistics.reused_tokens == 0
    assert all(r.statistics.reused_tokens >= KV_PAGE for r in reusing[1:])


def test_a_prefix_stored_without_the_auxiliary_is_computed_for_it(plain: LLM) -> None:
    llm = own(plain)
    prompt = [3 + i % 200 for i in range(100)]
    expected = own(plain, prefix_tokens=0).generate(prompt, BASE)[0].token_ids
    llm.generate(prompt, replace(BASE, method="sample"))
    result = llm.generate(prompt, BASE)[0]
    assert result.statistics.reused_tokens == KV_PAGE
    assert result.token_ids == expected


def test_nobody_learns_how_a_prompt_of_another_salt_began(plain: LLM) -> None:
    llm = own(plain)
    prompt = [3 + i % 200 for i in range(100)]

    def run(*salts: str) -> list[int]:
        requests = [llm.requests(prompt, BASE, cache_salt=salt)[0] for salt in salts]
        llm.loop.scheduler.submit(*requests)
        while not llm.loop.scheduler.idle:
            llm.step()
        return [request.statistics.reused_tokens for request in requests]

    assert run("a") == [0]
    assert run("b", "c", "") == [0, 0, 0], "neither kept, nor in another row"
    assert run("b", "b", "c", "c", "") == [KV_PAGE, 99, KV_PAGE, 99, KV_PAGE]
