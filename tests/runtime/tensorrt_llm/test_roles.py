"""The loop over executors, a fake of them: no row's tokens depend on others, and none are lost or mixed up."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache, partial
from typing import Any

import pytest
import torch

from mtad.methods import METHODS
from mtad.params import DecodingParams
from runtime.constraints.constraint import Constrainer
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import run_block_on_host
from runtime.decoder.kv_cache import KvCaches
from runtime.loop import DecodingLoop
from runtime.output.processor import OutputProcessor
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import Scheduler
from runtime.tensorrt_llm.auxiliary import Beam, ExecutorAuxiliary, levels_of
from runtime.tensorrt_llm.target import ExecutorTarget
from tests.runtime import test_schedules as engines
from tests.runtime.tensorrt_llm.test_executor import CAPACITY, make_spec, open_client
from tests.support import fake_executor as fake
from tests.support.mock_engine import EOS, VOCAB, mock_tokenizer
from tests.support.schedules import Entry, run_schedule

pytestmark = pytest.mark.slow


class Pair:
    """The loop over two fake executors."""

    def __init__(self, rows: int = 4, drafting: str = "steps", max_waiting: int = 64, vocab_size: int = VOCAB) -> None:
        target, self.target = open_client(make_spec("target", drafting))
        auxiliary, self.auxiliary = open_client(make_spec("auxiliary", drafting), noise=0.3)
        target.vocab_size = auxiliary.vocab_size = vocab_size
        scorer = ExecutorTarget(target)
        roles = ExecutorAuxiliary(auxiliary, scorer), scorer
        constrainer = Constrainer(mock_tokenizer(), VOCAB, (EOS,))
        self.loop = DecodingLoop(
            Scheduler(rows, CAPACITY, max_draft_len=4, max_beam_width=4, max_waiting=max_waiting),
            KvCaches(*roles),
            BatchBuilder(vocab_size, (EOS,)),
            partial(run_block_on_host, *roles),
            OutputProcessor(mock_tokenizer(), (EOS,), constrainer),
        )

    def run(self, *requests: Request) -> None:
        self.loop.scheduler.submit(*requests)
        while not self.loop.scheduler.idle:
            self.loop.step()
            self.loop.check_integrity()


def alone(prompt: list[int], params: DecodingParams, drafting: str) -> Request:
    request = Request(0, prompt, params, params.seed or 0)
    Pair(1, drafting).run(request)
    assert request.error is None
    return request


@cache
def pool(drafting: str) -> list[Entry]:
    """Those of the mock engine's schedules, with the tokens and the text it gives each; by search, with its own.

    Not those of a single token: an engine's auxiliary runs it twice, which attention does not notice but a hash does.
    """
    entries = [entry for entry in engines.pool() if len(entry[0]) > 1]
    if drafting == "steps":
        return entries
    found = [(prompt, params, alone(prompt, params, drafting)) for prompt, params, _, _ in entries[:60]]
    return [(prompt, params, request.tokens, request.text) for prompt, params, request in found]


def test_drafting_by_steps_gives_the_tokens_any_other_engine_gives() -> None:
    pair, entries = Pair(rows=4), pool("steps")[10:74]
    requests = [Request(at, prompt, params, params.seed or 0) for at, (prompt, params, _, _) in enumerate(entries)]
    pair.run(*requests)
    for request, (_, _, tokens, text) in zip(requests, entries, strict=True):
        assert request.error is None
        assert request.tokens == tokens
        assert request.text == text
    assert {request.params.method for request in requests} == METHODS.keys()
    assert max(pair.target.iterations) > 4, "rows are scored together"


def test_a_search_and_steps_beside_it_leave_the_executor_its_beam_width() -> None:
    """Of all methods, some draft by a search and others level by level: each gets the tokens it gets alone."""
    pair, entries = Pair(rows=4, drafting="search"), pool("search")[:25]
    requests = [Request(at, prompt, params, params.seed or 0) for at, (prompt, params, _, _) in enumerate(entries)]
    pair.run(*requests)
    assert [request.tokens for request in requests] == [tokens for _, _, tokens, _ in entries]
    assert len({request.params.method for request in requests}) > 6
    assert not pair.auxiliary.counts["corrupt"]


def run_pair(seed: int, drafting: str) -> Counter[str]:
    """One random schedule on executors that break, cancel and answer in any order."""
    chance = random.Random(seed)
    pair = Pair(chance.randint(1, 5), drafting, max_waiting=chance.choice([2, 64]))
    pair.target.chance, pair.auxiliary.chance = random.Random(seed), random.Random(seed + 1)

    def break_something(chance: random.Random) -> None:
        chance.choice([pair.auxiliary, pair.target]).faults = [chance.choice(["error", "nan", None])]

    reasons = run_schedule(seed, pair.loop, pool(drafting), break_something)
    assert pair.target.idle
    assert pair.auxiliary.idle
    return reasons


@pytest.mark.parametrize("drafting", ["steps", "search"])
def test_every_request_of_a_random_schedule_ends_exactly_once_with_the_tokens_it_gets_alone(drafting: str) -> None:
    reasons = sum((run_pair(seed, drafting) for seed in range(40)), Counter[str]())
    assert reasons["stop"] + reasons["length"] > 60
    assert reasons["cancelled"] > 2
    assert reasons["error"] > 2


@pytest.mark.parametrize("method", ["mtad", "modal"])
def test_one_beam_search_is_the_draft_of_temperature_0(method: str) -> None:
    """Unfiltered and without ends, an executor's beam search finds the beam that this package's own search finds.

    (A tree is not the same: the executor tells of the beams that are left, not of those that were dropped on the way.)
    """
    values = {"top_k": 0, "top_p": 1.0, "temperature": 0.0, "draft_len": 3, "max_tokens": 12, "ignore_eos": True}
    params = DecodingParams.from_dict({**values, "method": method})
    for seed in range(6):
        steps, search = (alone([1 + seed, 5, 2], params, drafting) for drafting in ("steps", "search"))
        assert (steps.tokens, steps.statistics.accepted) == (search.tokens, search.statistics.accepted)


def test_ids_of_padding_and_tokens_of_probability_0_are_never_drafted() -> None:
    """An executor knows neither the shared vocabulary nor this package's filter: beams end before such tokens."""
    ends, least = torch.arange(12) == 0, -math.inf
    assert Beam.of(([3, 1, 12, 4], [-1.0, -0.5, -0.1, -0.1]), 12, None, least) == Beam((3, 1), (-1.0, -1.5))
    assert Beam.of(([3, 1], [-math.inf, -0.5]), 12, None, least).tokens == ()
    assert Beam.of(([3, 1, 0, 2], [-1.0] * 4), 12, ends, least) == Beam((3, 1, 0), (-1.0, -2.0, -3.0), ended=True)
    assert Beam.of(([3, 1, 0, 2], [-1.0] * 4), 12, ends, -1.5) == Beam((3, 1), (-1.0, -2.0))
    params = DecodingParams(method="mmtad", top_k=0, top_p=1.0, max_tokens=24, seed=1, ignore_eos=True)
    request = Request(0, [3, 7, 2], params, 1)
    Pair(1, "search", vocab_size=VOCAB - 2).run(request)
    assert request.error is None
    assert len(request.tokens) == 24
    assert max(request.tokens) < VOCAB - 2


def test_only_a_text_that_has_ended_is_carried_down() -> None:
    """A beam that only stopped could beat the continuation of a likelier one."""
    beams = [Beam((3, 0), (-1.0, -1.1), ended=True), Beam((4, 5), (-1.0, -1.2)), Beam((3, 1, 2), (-1.0, -2.0, -3.0))]
    first, second, third = levels_of([beams], 3, 3)
    assert first.tokens[0, :2].tolist() == [3, 4]
    assert (second.tokens.tolist(), second.ended.tolist()) == ([[0, 5, 1]], [[True, False, False]])
    assert third.log_q[0].tolist() == pytest.approx([-1.1, -3.0, -math.inf])
    assert (third.drafted.tolist(), third.ended.tolist()) == ([[False, True, False]], [[True, False, False]])
    assert third.paths[0, :2].tolist() == [[0, 0, 0], [0, 2, 1]]


def test_a_block_is_one_request_per_row_and_one_per_leaf_of_a_tree() -> None:
    for method, most in (("mtad", 1), ("mmtad", 4)):
        params = DecodingParams(method=method, draft_len=4, temperature=0.0, max_tokens=24, ignore_eos=True)
        pair, request = Pair(1, "search"), Request(0, [4, 9, 1], params, 0)
        pair.run(request)
        passes = request.statistics.target_passes
        assert passes < len(request.tokens)
        assert passes <= pair.target.counts["enqueued"] <= most * passes
        assert len(pair.target.iterations) == len(pair.auxiliary.iterations) == passes
        assert (pair.target.counts["enqueued"] > passes) == (most > 1)


@pytest.mark.parametrize("method", ["speculative", "block", "specinfer"])
def test_a_draft_that_the_library_cut_or_discarded_counts_as_a_shorter_one(method: str) -> None:
    """Greedy and lossless: the tokens are the target's own, whatever part of a draft was scored."""
    values: dict[str, Any] = {"temperature": 0.0, "draft_len": 4, "max_tokens": 40, "ignore_eos": True}
    pair = Pair(4, "steps")
    pair.target.config.enable_chunked_context, pair.target.config.max_num_tokens = True, 100
    requests = [
        Request(at, [at + 1] * (20 + 3 * at), DecodingParams.from_dict({**values, "method": method}), 0)
        for at in range(4)
    ]
    pair.run(*requests)
    assert pair.target.counts["discarded"] > 9
    for request in requests:
        greedy = alone(request.prompt, DecodingParams.from_dict({**values, "method": "sample"}), "steps")
        assert request.error is None
        assert request.tokens == greedy.tokens
        assert request.statistics.accepted > 0


@pytest.mark.parametrize("fault", ["error", "nan"])
def test_a_tree_of_which_a_leaf_fails_ends_with_an_error_and_not_with_another_text(fault: str) -> None:
    params = DecodingParams(method="mmtad", seed=1, max_tokens=24, ignore_eos=True, accept_threshold=0.0)
    for leaf in range(4):
        pair, request = Pair(1), Request(0, [4, 9, 1], params, 1)
        pair.target.faults = [fault, *[None] * leaf]
        pair.run(request)
        assert request.finish_reason == "error"


def test_an_executor_that_is_gone_ends_the_requests_in_flight_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, params = Pair(2, "search"), DecodingParams(max_tokens=6, seed=1)
    first, second, third = (Request(at, [at + 1, 2, 3], params, at) for at in range(3))
    pair.loop.scheduler.submit(first, second, third)

    def broken(self: fake.Executor, timeout: object = None) -> list[fake.Response]:
        raise OSError("the worker is gone")

    with monkeypatch.context() as patch:
        patch.setattr(fake.Executor, "await_responses", broken)
        pair.loop.step()
    assert [request.finish_reason for request in (first, second, third)] == ["error", "error", None]
    pair.loop.check_integrity()
    while not pair.loop.scheduler.idle:
        pair.loop.step()
    assert third.finish_reason in ("stop", "length")
