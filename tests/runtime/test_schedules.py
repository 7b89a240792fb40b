"""Random schedules on a mock engine: whatever arrives, is cancelled or breaks, nothing is lost or mixed up."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from engines.base import Engine
from engines.vocabulary import Translation
from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.constraints.constraint import Constrainer
from runtime.decoder.block import BlockRunner
from runtime.decoder.engine_role import EngineRole
from runtime.decoder.host_runner import HostRunner
from runtime.decoder.kv_cache import KvCaches
from runtime.decoder.translated import TranslatedEngine
from runtime.loop import DecodingLoop
from runtime.output.processor import OutputProcessor
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.speculation.lengths import draft_lengths
from runtime.speculation.planner import Planner
from tests.support.integrity import check_page_table
from tests.support.mock_engine import EOS, VOCAB, MockEngine, PagedMock, mock_spec, mock_tokenizer
from tests.support.schedules import Entry, run_schedule

CAPACITY = 256
SHARED = [3 + i % 5 for i in range(70)]
"""Longer than a block of the prefix cache, so that it is kept and found."""


class RandomPlanner(Planner):
    """Chooses often and by chance, whatever blocks take."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def _choose(self, requests: Sequence[Request], rows: int) -> None:
        self.length, self._blocks_left = self._chance.choice(draft_lengths(4)), self._chance.randint(1, 4)


@dataclass
class Mock:
    """A loop on mock engines."""

    loop: DecodingLoop
    auxiliary: MockEngine
    target: MockEngine


def make_mock(
    rows: int,
    max_prefill_tokens: int = 64,
    prefix_tokens: int = 0,
    max_waiting: int = 64,
    planner: Planner | None = None,
    pages: int = 0,
    words: Translation | None = None,
) -> Mock:
    spec = mock_spec(rows, CAPACITY)
    auxiliary, target = (PagedMock(spec, noise, pages) if pages else MockEngine(spec, noise) for noise in (0.3, 0.0))
    drafting: Engine = auxiliary
    if words:
        auxiliary = PagedMock(spec, 0.3) if pages else auxiliary  # its pages are not shared out
        drafting = TranslatedEngine(auxiliary, words, 4 * 4)
    roles = EngineRole(drafting, VOCAB), EngineRole(target, VOCAB)
    loop = make_loop(roles, HostRunner(*roles, (EOS,)), max_prefill_tokens, prefix_tokens, max_waiting)
    loop.planner = planner or loop.planner
    return Mock(loop, auxiliary, target)


def make_loop(
    roles: tuple[EngineRole, EngineRole],
    runner: BlockRunner,
    max_prefill_tokens: int,
    prefix_tokens: int,
    max_waiting: int = 64,
    unrecorded: dict[str, int] | None = None,
) -> DecodingLoop:
    """A loop over mock engines, the auxiliary's role and the target's."""
    auxiliary, target = (role.engine.cache.prefix_cache(prefix_tokens) for role in roles)
    constrainer = Constrainer(mock_tokenizer(), VOCAB, (EOS,))
    return DecodingLoop(
        Scheduler(roles[0].engine.spec.rows, CAPACITY, max_draft_len=4, max_beam_width=4, max_waiting=max_waiting),
        KvCaches(*roles, (auxiliary, target)),
        runner,
        OutputProcessor(mock_tokenizer(), (EOS,), constrainer, unrecorded),
        max_prefill_tokens,
    )


def alone(prompt: list[int], params: DecodingParams, words: Translation | None = None) -> Request:
    """A request that has ended, and was the only one."""
    mock, request = make_mock(rows=1, words=words), Request(0, prompt, params, params.seed or 0)
    mock.loop.scheduler.submit(request)
    while not mock.loop.scheduler.idle:
        mock.loop.step()
    return request


def pick_values(chance: random.Random) -> dict[str, Any]:
    """Parameters of a random request; a fifth have drafts that follow the load, at temperature 0: else tokens vary."""
    values = {
        "method": chance.choice([*METHODS, "mtad", "mmtad"]),
        "draft_len": chance.randint(1, 4),
        "beam_width": chance.randint(1, 4),
        "branching": chance.choice([(2, 2, 1, 1), (3, 1), (4,)]),
        "accept_threshold": chance.choice([0.0, 0.3, 0.8]),
        "draft_confidence": chance.choice([0.0, 0.0, 0.1, 0.4]),
        "temperature": chance.choice([0.0, 1.0, 1.0]),
        "top_k": chance.choice([0, 3, 10]),
        "max_tokens": chance.choice([1, 2, 5, 9, 16]),
        "ignore_eos": chance.random() < 0.5,
        "stop": chance.choice([(), (), ("cab",), ("e", "fg")]),
        "seed": chance.randrange(1000),
    }
    if chance.random() < 0.2:
        values |= {"method": "speculative", "temperature": 0.0, "draft_len": "auto"}
    return values


def pick_prompt(chance: random.Random) -> list[int]:
    start = SHARED[: chance.choice([0, 0, 65, 70])]
    return start + [chance.randrange(1, VOCAB) for _ in range(chance.choice([1, 2, 3, 9, 30]))]


@cache
def pool(crowding: bool = False, words: Translation | None = None) -> list[Entry]:
    """Requests, and the tokens and the text each of them gets alone; those that crowd a pool outgrow a page."""
    chance, entries = random.Random(0), list[Entry]()
    for _ in range(40 if crowding else 150):
        prompt, values = pick_prompt(chance), pick_values(chance)
        if crowding:
            prompt, values = prompt + SHARED[: 45 - len(prompt) % 64], values | {"max_tokens": 16, "ignore_eos": True}
        params = DecodingParams.from_dict(values)
        request = alone(prompt, params, words)
        entries.append((prompt, params, request.tokens, request.text))
    return entries


def run_mock(seed: int, pages: int = 0, words: Translation | None = None) -> Counter[str]:
    """One random schedule on mock engines of random sizes; with `pages`, of a crowded pool of so many."""
    chance = random.Random(seed)
    mock = make_mock(
        rows=chance.randint(3 if pages else 1, 5),
        max_prefill_tokens=chance.choice([1, 7, 64, 300]),
        prefix_tokens=chance.choice([0, 64, 64 if pages else 512]),
        planner=RandomPlanner(chance),
        max_waiting=chance.choice([2, 64]),
        pages=pages,
        words=words,
    )

    def break_something(chance: random.Random) -> None:
        engine = chance.choice([mock.auxiliary, mock.target])
        engine.faults = [chance.choice([OSError("injected"), chance.randrange(5), None]) for _ in range(3)]

    reasons = run_schedule(seed, mock.loop, pool(bool(pages), words), break_something)
    for kv in (mock.auxiliary.cache.kv, mock.target.cache.kv):
        assert not kv.isnan().any(), "a failed request's row was not cleared"
    if isinstance(mock.target, PagedMock):
        for engine in (mock.auxiliary, mock.target):
            assert isinstance(engine, PagedMock)
            assert not engine.cache.table.owned.any(), "a row keeps pages that nobody needs"
            assert not engine.cache.kv[:, :, :, :64].any(), "a page that nobody has was written"
            check_page_table(engine.cache)
        reasons["preempted"] = mock.loop.totals.preemptions
    return reasons


@pytest.mark.slow
def test_requests_that_are_preempted_when_pages_run_out_get_the_tokens_they_get_alone() -> None:
    reasons = sum((run_mock(seed, pages=CAPACITY // 64) for seed in range(28)), Counter[str]())
    assert reasons["preempted"] > 5
    assert reasons["stop"] + reasons["length"] > 40


@pytest.mark.slow
def test_an_auxiliary_that_spells_tokens_in_its_own_drafts_for_each_request_as_it_does_alone() -> None:
    sizes = np.array([1, 1, 2, 1, 9, 1, 8, 1, 3, 1, 1, 1])  # some texts are longer than the auxiliary's capacity
    pieces, one = np.random.default_rng(0).integers(0, VOCAB, sizes.sum()), np.flatnonzero(sizes == 1)
    drafted = np.full(VOCAB, -1)
    drafted[one] = pieces[sizes.cumsum()[one] - 1] = np.array([0, 7, 3, 1, 2, 11, 10, 5])[: len(one)]
    words = Translation(pieces, sizes.cumsum(), sizes, drafted, (6,))
    reasons = sum((run_mock(seed, pages, words) for seed in range(30) for pages in (0, CAPACITY // 64)), Counter[str]())
    assert min(reasons[one] for one in ("stop", "length", "cancelled", "error", "preempted")) > 3


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(3))
def test_every_request_of_a_random_schedule_ends_exactly_once_with_the_tokens_it_gets_alone(batch: int) -> None:
    reasons = sum((run_mock(seed) for seed in range(batch * 60, batch * 60 + 60)), Counter[str]())
    assert reasons["stop"] + reasons["length"] > 120
    assert reasons["cancelled"] > 3
    assert reasons["error"] > 3
