"""The torch engine's pages: texts that fit together run together, and nothing is copied that can be shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.base import KV_PAGE, Step
from engines.buffers import to_device
from engines.cache.paged import EMPTY, OWN, SPARE, PageCache, by_page
from engines.folder import open_engine, read_spec
from engines.placement import Placement
from engines.pytorch.engine import TorchEngine
from mtad import LLM, DecodingParams, RuntimeConfig
from runtime.pair import Pair, open_pair
from tests.support.integrity import check_loop, check_page_table, check_prefixes
from tests.support.mock_engine import PagedMock, mock_spec
from tests.support.quick_filters import quick_filters
from tests.support.replayed import ReplayRecorder
from tests.support.steps import columns_of

PARAMS = DecodingParams(method="mmtad", max_tokens=90, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def pair(pair_folders: Callable[[str], Path]) -> Pair:
    return open_pair(pair_folders("torch"), RuntimeConfig(threads=1))


@pytest.mark.slow
def test_rows_beyond_what_memory_holds_whole_end_their_texts_on_a_small_pool(
    pair: Pair, pair_folders: Callable[[str], Path]
) -> None:
    whole = LLM(pair, RuntimeConfig(prefix_tokens=0))
    prompts = [f"{number} singers " * 6 for number in range(8)]
    expected = [whole.generate(prompt, PARAMS)[0].token_ids for prompt in prompts]
    asked = RuntimeConfig(threads=1, prefix_tokens=0, rows=8)
    memory = replace(whole.memory, rows=8, pages=whole.memory.capacity // KV_PAGE + 1)
    small = LLM(pair_folders("torch"), replace(asked, memory=memory.total))
    assert small.memory == memory
    found = [result.token_ids for result in small.generate(prompts, PARAMS)]
    assert found == expected
    assert small.loop.totals.preemptions > 0
    check_loop(small.loop)
    for engine in (small.pair.target, small.pair.auxiliary):
        assert isinstance(engine.cache, PageCache)
        assert not engine.cache.table.owned.any(), "a row that nobody has holds pages"
        assert engine.cache.kv.nbytes == (engine.cache.pages + OWN) * engine.cache.page_bytes
        check_page_table(engine.cache)


def test_a_prompt_that_begins_alike_and_a_row_that_moves_share_pages() -> None:
    engine = PagedMock(mock_spec(3, 256), 0.0)
    engine.cache.reserve([(0, 150)])
    engine.cache.kv[:, :, :, OWN * KV_PAGE :].normal_()
    first = columns_of(engine)[:, :, 0].clone()
    before, free = engine.cache.kv.clone(), engine.cache.table.pages.free
    engine.cache.copy(0, 2, 100)
    assert torch.equal(engine.cache.kv, before)
    assert engine.cache.table.pages.free == free
    assert torch.equal(columns_of(engine)[:, :, 2, :, :100], first[:, :, :, :100])
    engine.cache.reserve([(100, 101)], first_row=2)
    assert engine.cache.table.pages.free == free - 1, "the page that both write to, and no other"
    assert torch.equal(columns_of(engine)[:, :, 2, :, :100], first[:, :, :, :100])
    engine.cache.clear(2, 90)
    assert torch.equal(columns_of(engine)[:, :, 0], first)
    assert torch.equal(columns_of(engine)[:, :, 2, :, :90], first[:, :, :, :90])
    assert not columns_of(engine)[:, :, 2, :, 90:].any()
    engine.cache.release(0)
    engine.cache.release(2)
    assert (engine.cache.page_table[:, :-1] == EMPTY).all()
    check_page_table(engine.cache)


def test_on_a_cpu_it_has_the_threads_that_it_is_given(pair_folders: Callable[[str], Path]) -> None:
    before = torch.get_num_threads()
    try:
        open_engine(pair_folders("torch") / "target", Placement(threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_others_left_in_the_pool_reaches_no_row(pair_folders: Callable[[str], Path]) -> None:
    """What a mask hides counts 0 times, and 0 times NaN is NaN."""
    folder = pair_folders("torch") / "target"
    engine, tokens = TorchEngine(folder, read_spec(folder), "sdpa"), torch.arange(3, 8)[None]
    step = Step.causal(tokens, 0, engine.spec.capacity, torch.arange(5))
    expected = engine.step(step)
    engine.cache.reserve([(0, 100)])
    by_page(engine.cache.kv)[:, :, :, SPARE:] = torch.nan  # of padded rows, and of a prompt that was cancelled
    engine.cache.release(0)
    assert torch.equal(engine.step(step), expected)


def test_a_kept_prefix_of_many_pages_is_restored_by_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens, uploads = PagedMock(mock_spec(3, 512), 0.0), list(range(400)), list[object]()
    prefixes = engine.cache.prefix_cache(512)
    engine.cache.reserve([(0, 400)])
    prefixes.store(0, tokens)

    def counted(given: object, device: torch.device) -> torch.Tensor:
        uploads.append(given)
        return to_device(given, device)

    monkeypatch.setattr("engines.cache.paged.to_device", counted)
    assert prefixes.restore(1, tokens) == 384
    assert len(uploads) == 1
    assert torch.equal(engine.cache.page_table[1, :6], engine.cache.page_table[0, :6])
    assert prefixes.restore(2, tokens[:64], 64) == 64, "what the row has is left alone"
    assert len(uploads) == 1
    check_prefixes(prefixes)
    check_page_table(engine.cache)


@pytest.mark.slow
@quick_filters()
def test_a_pair_that_is_opened_once_keeps_one_pool_however_many_runtimes_it_has(pair: Pair) -> None:
    prompt, short = list(range(3, 140)), replace(PARAMS, max_tokens=8, draft_len=2, beam_width=2)
    engine, tokens = pair.target, []
    assert isinstance(engine.cache, PageCache)
    for _ in range(2):
        llm = LLM(pair, RuntimeConfig(prefix_tokens=128), recorder=ReplayRecorder(), record=[short])
        pages, recorded = len(engine.cache.table.pages.users), llm.blocks and dict(llm.blocks._blocks)
        tokens += [result.token_ids for result in llm.generate([prompt, prompt], short)]
        assert llm.blocks
        assert dict(llm.blocks._blocks) == recorded
        check_loop(llm.loop)
    assert len(set(map(tuple, tokens))) == 1
    assert pages == engine.cache.pages + 2, "the second runtime's prefixes take the place of the first's"
    LLM(pair, RuntimeConfig(prefix_tokens=256)).generate(prompt, short)
    assert llm.generate(prompt, short)[0].token_ids == tokens[0], "what was recorded on a smaller pool is not launched"
    check_loop(llm.loop)


def test_a_row_that_drafts_nothing_beside_another_writes_to_no_page_that_rows_share(pair: Pair) -> None:
    small = LLM(pair, RuntimeConfig(max_draft_len=1, max_beam_width=1))
    both = [replace(PARAMS, method=method, draft_len=1) for method in ("sample", "speculative")]
    small.generate([[5] * 40] * 2, both)
    cache = pair.auxiliary.cache
    assert isinstance(cache, PageCache)
    assert not cache.by_page(cache.kv)[:, :, :, EMPTY].any()
