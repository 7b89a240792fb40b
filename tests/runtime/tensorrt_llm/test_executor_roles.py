"""TensorRT-LLM executors, a fake of them: requests are asked for as recorded, and no row's tokens depend on others."""

from __future__ import annotations

import inspect
import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path as Folder
from typing import Any

import pytest

from engines.tensorrt_llm_spec import ExecutorSpec
from mtad.errors import InvalidInput
from mtad.params import METHODS, DecodingParams
from runtime.constraints.constraint import Constrainer
from runtime.decoder.batch_builder import BatchBuilder
from runtime.decoder.block import run_block_on_host
from runtime.decoder.kv_cache import KvCaches
from runtime.loop import DecodingLoop
from runtime.output.processor import OutputProcessor
from runtime.scheduler.request import Request
from runtime.scheduler.scheduler import QueueFull, Scheduler
from runtime.tensorrt_llm import compat as library
from runtime.tensorrt_llm.beams import Path
from runtime.tensorrt_llm.drafting import Drafting
from runtime.tensorrt_llm.exchange import Exchange
from runtime.tensorrt_llm.executor import Client, ExecutorFailed, Logits
from runtime.tensorrt_llm.loop import ExecutorLoop
from runtime.tensorrt_llm.roles import ExecutorAuxiliary, ExecutorTarget
from tests.runtime import test_schedules as engines
from tests.support import fake_executor as fake
from tests.support.mock_engine import EOS, VOCAB, mock_tokenizer

CAPACITY = 256


def make_spec(role: Any, **changes: Any) -> ExecutorSpec:
    spec = ExecutorSpec(
        role=role,
        architecture="Mock",
        vocab_size=VOCAB,
        dtype="float16",
        quantization="none",
        tensor_parallel=1,
        rows=4,
        capacity=CAPACITY,
        draft_len=4,
        beam_width=4,
        max_batch_size=16,
        max_input_len=CAPACITY,
        max_seq_len=CAPACITY + 5,
        max_num_tokens=512,
        max_beam_width=1 if role == "target" else 4,
        max_draft_len=4 if role == "target" else 0,
        eos_token_ids=(EOS,),
        checkpoint_hash="",
        versions={},
    )
    return replace(spec, **changes)


def open_client(role: Any, noise: float, **changes: Any) -> tuple[Client, fake.Executor]:
    spec = make_spec(role, **changes)
    names = ("max_input_len", "max_seq_len", "max_draft_len", "max_beam_width")
    fake.ENGINES[role] = fake.Limits(noise, **{name: getattr(spec, name) for name in names})
    client = Client.open(Folder(role), fake, spec, VOCAB, memory_fraction=0.4)
    return client, fake.Executor.made.pop()


class Pair:
    """A loop over two fake executors."""

    def __init__(
        self, rows: int = 4, drafting: Drafting = "steps", in_step: bool = False, max_waiting: int = 64
    ) -> None:
        target, self.target = open_client("target", 0.0)
        auxiliary, self.auxiliary = open_client("auxiliary", 0.3)
        scorer = ExecutorTarget(target, Exchange())
        roles = ExecutorAuxiliary(auxiliary, scorer, drafting), scorer
        scheduler = Scheduler(rows, CAPACITY, max_draft_len=4, max_beam_width=4, max_waiting=max_waiting)
        constrainer = Constrainer(mock_tokenizer(), VOCAB, (EOS,))
        self.drafter, self.scorer = roles
        self.loop: Any
        if in_step:
            output = OutputProcessor(mock_tokenizer(), (EOS,), constrainer)
            run_block = partial(run_block_on_host, *roles)
            self.loop = DecodingLoop(scheduler, KvCaches(*roles), BatchBuilder(VOCAB, (EOS,)), run_block, output)
        else:
            self.loop = ExecutorLoop(*roles, scheduler, mock_tokenizer(), VOCAB, (EOS,), constrainer)

    def run(self, *requests: Request) -> None:
        self.loop.submit(*requests)
        while not self.loop.scheduler.idle:
            self.loop.step()
            self.loop.check_integrity()


@pytest.mark.parametrize("name", fake.RECORDED)
def test_the_fake_has_the_recorded_signatures(name: str) -> None:
    owner: Any = fake
    for part in name.split("."):
        owner = getattr(owner, part)
    found = inspect.signature(owner)
    plain = found.replace(
        parameters=[p.replace(annotation=p.empty) for p in found.parameters.values()],
        return_annotation=found.empty,
    )
    assert str(plain) == fake.RECORDED[name]


def test_what_is_passed_by_name_is_recorded() -> None:
    library.check(fake, library.EXECUTOR, "1.2.1")


def test_a_library_that_lacks_something_is_refused_and_all_of_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake.Executor, "cancel_request")
    monkeypatch.setattr(fake, "Request", fake._record("Request", "(input_token_ids, max_tokens)"))
    with pytest.raises(InvalidInput) as caught:
        library.check(fake, library.EXECUTOR, "1.3.0")
    for words in ("Executor.cancel_request", "Request(end_id=)", "1.3.0", "1.2.0 and 1.2.1"):
        assert words in str(caught.value)


def test_parameters_of_functions_without_a_signature_are_read_from_their_docstring() -> None:
    class Overloaded:
        __signature__ = "not one"
        __doc__ = "f(self, timeout: float | None = None) -> list\nf(self, ids: list[int], timeout: float = 0) -> list"

        def __call__(self) -> None: ...

    assert library.parameters(Overloaded()) == {"timeout", "ids"}


def test_a_missing_library_is_one_clear_error() -> None:
    with pytest.raises(InvalidInput, match=r"mtad\[tensorrt-llm\]"):
        library.executor_bindings()


@cache
def pool() -> list[tuple[list[int], DecodingParams, list[int], str]]:
    """Those of the mock engine's schedules, with the tokens and the text it gives each.

    Not those of a single token: an engine's auxiliary runs it twice, which attention does not notice but a hash does.
    """
    return [entry for entry in engines.pool() if len(entry[0]) > 1]


@pytest.mark.parametrize("in_step", [True, False])
def test_drafting_by_steps_gives_the_tokens_any_other_engine_gives(in_step: bool) -> None:
    pair = Pair(rows=4, in_step=in_step)
    chosen = pool()[10:74]
    requests = [Request(at, prompt, params, params.seed or 0) for at, (prompt, params, _, _) in enumerate(chosen)]
    pair.run(*requests)
    for request, (_, _, tokens, text) in zip(requests, chosen, strict=True):
        assert request.error is None
        assert request.tokens == tokens
        assert request.text == text
    assert {request.params.method for request in requests} == METHODS.keys()
    assert pair.target.largest > 4, "executors are given several rows' requests at a time"


def run_schedule(
    seed: int, drafting: Drafting, alone: list[tuple[list[int], DecodingParams, list[int], str]]
) -> Counter[str]:
    """One random schedule, with cancellations and faults; how its requests ended."""
    chance = random.Random(seed)
    pair = Pair(chance.randint(1, 5), drafting, in_step=chance.random() < 0.3, max_waiting=chance.choice([2, 64]))
    pair.target.chance, pair.auxiliary.chance = random.Random(seed), random.Random(seed + 1)
    faulty, cancelling = chance.random() < 0.4, chance.random() < 0.5
    todo = [chance.randrange(len(alone)) for _ in range(chance.randint(1, 9))]
    entry: dict[int, int] = {}
    live: dict[int, Request] = {}
    ended: list[Request] = []
    while todo or not pair.loop.scheduler.idle:
        for _ in range(min(chance.choice([0, 1, 1, 3]), len(todo))):
            prompt, params, _, _ = alone[todo[-1]]
            request = Request(len(entry), prompt, params, params.seed or 0, priority=chance.choice([0, 0, 1]))
            try:
                pair.loop.submit(request)
            except QueueFull:
                break
            entry[request.id] = todo.pop()
            live[request.id] = request
        if cancelling and live and chance.random() < 0.1:
            pair.loop.cancel(chance.sample(list(live.values()), 1))
            pair.loop.check_integrity()
        if faulty and chance.random() < 0.1:
            executor = chance.choice([pair.auxiliary, pair.target])
            executor.faults = [chance.choice(["error", "nan", None])]
        for request in pair.loop.step():
            assert live.pop(request.id) is request, "ended twice, or never began"
            ended.append(request)
        pair.loop.check_integrity()
    assert not live, "lost"
    for request in ended:
        _, _, tokens, text = alone[entry[request.id]]
        if request.finish_reason in ("stop", "length"):
            assert request.tokens == tokens, f"request {request.id} of schedule {seed} has other tokens than alone"
            assert request.text == text
        else:
            assert request.tokens == tokens[: len(request.tokens)]
        assert (request.error is not None) == (request.finish_reason == "error")
    reasons = Counter(str(request.finish_reason) for request in ended)
    assert pair.loop.totals.requests == {**dict.fromkeys(("stop", "length", "cancelled", "error"), 0), **reasons}
    for executor in (pair.target, pair.auxiliary):
        assert not [number for number in executor._open if number > 0], "an executor works on what nobody waits for"
    return reasons


def by(drafting: Drafting) -> list[tuple[list[int], DecodingParams, list[int], str]]:
    """The pool with the tokens each request gets alone when drafted for in this way."""
    found = []
    for prompt, params, _, _ in pool()[:60]:
        request = Request(0, prompt, params, params.seed or 0)
        Pair(1, drafting).run(request)
        assert request.error is None
        found.append((prompt, params, request.tokens, request.text))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["steps", "search", "samples"])
def test_every_request_of_a_random_schedule_ends_exactly_once_with_the_tokens_it_gets_alone(drafting: Drafting) -> None:
    alone = pool() if drafting == "steps" else by(drafting)
    reasons: Counter[str] = Counter()
    for seed in range(30):
        reasons += run_schedule(seed, drafting, alone)
    assert reasons["stop"] + reasons["length"] > 60
    assert reasons["cancelled"] > 2
    assert reasons["error"] > 2


@pytest.mark.parametrize("method", ["mtad", "modal"])
def test_one_beam_search_is_the_draft_of_temperature_0(method: str) -> None:
    """Unfiltered and without ends, an executor's beam search finds the beam that this package's own search finds.

    (A tree is not the same: the executor tells of the beams that are left, not of those that were dropped on the way.)
    """
    values = {"top_k": 0, "top_p": 1.0, "temperature": 0.0, "draft_len": 3, "max_tokens": 12, "ignore_eos": True}
    for seed in range(10):
        params = DecodingParams.from_dict({**values, "method": method})
        found = []
        for drafting in ("steps", "search"):
            request = Request(0, [1 + seed, 5, 2], params, 0)
            Pair(1, drafting).run(request)
            found.append((request.tokens, request.statistics.accepted))
        assert found[0] == found[1]


def test_samples_are_judged_by_the_rows_own_filter() -> None:
    """Each sampled token's likelihood is that of the filtered distribution; what that forbids is not drafted."""
    params = DecodingParams(method="mtad", top_k=3, top_p=0.9, draft_len=3, beam_width=4, max_tokens=24, seed=5)
    request = Request(0, [3, 7, 2], params, 5)
    pair = Pair(1, "samples")
    pair.run(request)
    assert request.error is None
    assert request.statistics.accepted > 3


@pytest.mark.parametrize("drafting", ["search", "samples"])
def test_ids_of_padding_and_tokens_of_probability_0_are_never_drafted(drafting: Drafting) -> None:
    """An executor knows neither the shared vocabulary nor this package's filter: beams end before such tokens."""
    assert Path.of([3, 1, 12, 4], [-1.0, -0.5, -0.1, -0.1]).known(12) == Path((3, 1), (-1.0, -1.5))
    assert Path.of([3, 1], [-math.inf, -0.5]).known(12).tokens == ()
    assert Path.of([3, 1, 0, 2], [-1.0] * 4).cut([token == 0 for token in range(12)], -math.inf).tokens == (3, 1, 0)
    assert Path.of([3, 1, 0, 2], [-1.0] * 4).cut(None, -1.5).tokens == (3, 1)
    pair = Pair(1, drafting)
    for client in (pair.scorer.client, pair.drafter.client):
        client.vocab_size = VOCAB - 2
    pair.loop._sizes = VOCAB - 2, (EOS,)
    params = DecodingParams(method="mmtad", top_k=0, top_p=1.0, max_tokens=24, seed=1, ignore_eos=True)
    request = Request(0, [3, 7, 2], params, 1)
    pair.run(request)
    assert request.error is None
    assert len(request.tokens) == 24
    assert max(request.tokens) < VOCAB - 2


def test_a_round_is_one_request_a_row_and_one_a_leaf_of_a_tree() -> None:
    for method, most in (("mtad", 1), ("mmtad", 4)):
        params = DecodingParams(
            method=method, draft_len=4, beam_width=4, temperature=0.0, max_tokens=24, ignore_eos=True
        )
        request = Request(0, [4, 9, 1], params, 0)
        pair = Pair(1, "search")
        pair.run(request)
        passes = request.statistics.target_passes
        assert passes <= pair.target.counts["enqueued"] <= most * passes
        assert pair.auxiliary.counts["enqueued"] == passes
        assert (pair.target.counts["enqueued"] > passes) == (most > 1)


@pytest.mark.slow
def test_no_row_waits_for_the_slowest_one() -> None:
    """While one row's answer does not come, the others run to their end. In step, all wait for it."""
    params = DecodingParams(method="mtad", draft_len=2, beam_width=2, max_tokens=12, ignore_eos=True, seed=1)
    pair = Pair(4, "search")
    requests = [Request(at, [at + 1, 2, 3], params, at) for at in range(4)]
    pair.target.slow = (1, 2, 3), 10**9
    pair.loop.submit(*requests)
    for _ in range(100):
        pair.loop.step()
        pair.loop.check_integrity()
    assert [len(request.tokens) for request in requests] == [0, 12, 12, 12]
    pair.loop.cancel(requests[:1])
    assert pair.target.counts["cancelled"] == 1
    assert pair.loop.scheduler.idle
    step = Pair(4, "search", in_step=True)
    step.target.slow = (1, 2, 3), 50
    step.loop.submit(*(Request(at, [at + 1, 2, 3], params, at) for at in range(4)))
    step.loop.step()
    assert step.target.counts["waited"] > 50


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_input_len": 16}, "max_input_len"),
        ({"max_draft_len": 2}, "max_draft_len"),
        ({"max_seq_len": 16}, "max_seq_len"),
    ],
)
def test_what_the_library_would_cut_off_is_an_error_of_that_request_alone(changes: dict[str, int], words: str) -> None:
    client, executor = open_client("target", 0.0, **changes)
    with pytest.raises(ExecutorFailed, match=words):
        client.submit([Logits([1] * 14, [2, 3, 4])])
    assert not executor.counts["enqueued"]


def test_an_answer_with_too_few_rows_is_refused() -> None:
    """An engine whose own limit is below what its description says drops draft tokens, and only its log knows."""
    client, executor = open_client("target", 0.0)
    executor.limits = replace(executor.limits, max_input_len=15)
    (number,) = client.submit([Logits([1] * 13, [2, 3, 4])])
    answers: dict[int, Any] = {}
    while not answers:
        answers = dict(client.take(0.0))
    assert isinstance(answers[number], ExecutorFailed)
    assert "(1, 3, " in str(answers[number])


def test_executors_reuse_blocks_gather_logits_and_only_the_auxiliary_has_graphs() -> None:
    for role in ("target", "auxiliary"):
        _, executor = open_client(role, 0.0)
        config = executor.config
        assert config.kv_cache_config.enable_block_reuse
        assert config.gather_generation_logits
        assert not config.normalize_log_probs
        assert config.enable_chunked_context
        assert config.kv_cache_config.free_gpu_memory_fraction == 0.4
        assert config.extended_runtime_perf_knob_config.cuda_graph_mode == (role == "auxiliary")
        assert config.parallel_config.orchestrator_config is None
    spec, worker = make_spec("target"), Folder("bin/executorWorker")
    Client.open(Folder("target"), fake, spec, VOCAB, memory_fraction=0.4, devices=[1], worker=worker)
    parallel = fake.Executor.made.pop().config.parallel_config
    assert parallel.device_ids == [1]
    assert parallel.communication_mode is fake.CommunicationMode.ORCHESTRATOR
    assert parallel.orchestrator_config.worker_executable_path == str(worker)


def test_an_executor_that_is_gone_ends_the_requests_in_flight_and_no_others() -> None:
    pair = Pair(2, "search")
    params = DecodingParams(max_tokens=6, seed=1)
    first, second, third = (Request(at, [at + 1, 2, 3], params, at) for at in range(3))
    pair.loop.submit(first, second, third)
    real = fake.Executor.await_responses

    def broken(self: fake.Executor, timeout: object = None) -> list[fake.Response]:
        raise OSError("the worker is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake.Executor, "await_responses", broken)
        pair.loop.step()
    assert fake.Executor.await_responses is real
    assert [request.finish_reason for request in (first, second, third)] == ["error", "error", None]
    pair.loop.check_integrity()
    while not pair.loop.scheduler.idle:
        pair.loop.step()
    assert third.finish_reason in ("stop", "length")
