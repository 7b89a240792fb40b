"""Requests to an executor, on a fake as unkind as the library: drafts are scored whole, and together."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engines.tensorrt_llm_spec import ExecutorSpec
from export.tensorrt_llm.engine_plan import sizes
from mtad.errors import InvalidInput
from runtime.tensorrt_llm import compat as library
from runtime.tensorrt_llm.executor import ExecutorClient
from tests.support import fake_executor as fake
from tests.support.mock_engine import EOS, VOCAB

CAPACITY, DRAFT = 256, 4
Opened = tuple[ExecutorClient, fake.Executor]


def make_spec(role: Any, drafting: Any = "search", rows: int = 4, beam_width: int = 4) -> ExecutorSpec:
    """An engine as it is exported for trees; the model has more ids than the pair shares."""
    width = beam_width if role == "auxiliary" and drafting == "search" else 1
    return ExecutorSpec(
        role=role,
        architecture="Mock",
        vocab_size=VOCAB + fake.BEYOND,
        dtype="float16",
        quantization="none",
        tensor_parallel=1,
        rows=rows,
        capacity=CAPACITY,
        draft_len=DRAFT,
        beam_width=beam_width,
        drafting=drafting,
        max_beam_width=width,
        max_draft_len=DRAFT if role == "target" else 0,
        eos_token_ids=(EOS,),
        checkpoint_hash="",
        versions={},
        **sizes(rows, CAPACITY, beam_width // width, width, DRAFT),
    )


def open_client(spec: ExecutorSpec, **changes: Any) -> Opened:
    fake.ENGINES[spec.role] = fake.limits(spec, **changes)
    return ExecutorClient.open(Path(spec.role), fake, spec, VOCAB), fake.Executor.made.pop()


@pytest.fixture
def target() -> Opened:
    return open_client(make_spec("target"))


def expected(text: list[int], draft: list[int]) -> torch.Tensor:
    return torch.stack([fake.mock_logits([*text, *draft[:count]], 0.0) for count in range(len(draft) + 1)])


@pytest.mark.parametrize("name", fake.RECORDED)
def test_the_fake_has_the_recorded_signatures(name: str) -> None:
    owner: Any = fake
    for part in name.split("."):
        owner = getattr(owner, part)
    found = inspect.signature(owner)
    plain = found.replace(
        parameters=[p.replace(annotation=p.empty) for p in found.parameters.values()], return_annotation=found.empty
    )
    assert str(plain) == fake.RECORDED[name]


def test_another_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", lambda: "1.3.0")
    with pytest.raises(InvalidInput, match=r"1\.3\.0.*another release.*tensorrt-llm==1\.2\.1"):
        library.executor_bindings()


def test_a_missing_library_is_one_clear_error() -> None:
    with pytest.raises(InvalidInput, match="NVIDIA's package index"):
        library.executor_bindings()


def raw(text: list[int], external: Any = None, top_p: float | None = None) -> Any:
    """A request that is not the client's."""
    return fake.Request(
        text,
        1 if external is None else 1 + len(external.tokens),
        sampling_config=fake.SamplingConfig(top_p=top_p),
        output_config=fake.OutputConfig(return_generation_logits=True, exclude_input_from_output=True),
        end_id=-1,
        external_draft_tokens_config=external,
    )


def answers(executor: fake.Executor, *requests: Any) -> list[int]:
    """Rows of logits that each request gets back."""
    numbers, found = executor.enqueue_requests(list(requests)), dict[int, Any]()
    while len(found) < len(numbers):
        found |= {each.request_id: each.result for each in executor.await_responses()}
    return [found[number].generation_logits.shape[1] for number in numbers]


def test_the_fake_returns_accepted_rows_only_and_the_last_request_sets_the_threshold() -> None:
    """Why drafts are offered as they are: each of the simpler ways loses rows."""
    _, executor = open_client(make_spec("target"))
    text = [4, 9, 1]
    unlikely = int(fake.mock_logits(text, 0.0).argmin())
    draft = [unlikely, 3, 5]
    assert answers(executor, raw(text, fake.ExternalDraftTokensConfig(draft))) == [1]
    zeros = torch.zeros(3, VOCAB + fake.BEYOND)
    known = fake.ExternalDraftTokensConfig(draft, zeros, 1e-30)
    assert answers(executor, raw(text, known)) == [1], "without top-p the likeliest token alone has a probability"
    assert answers(executor, raw(text, known, top_p=1.0)) == [4]
    short = [answers(executor, raw(text, known, top_p=1.0), raw([1, 2]))[0] < 4 for _ in range(20)]
    assert any(short), "a request without a draft makes the threshold of all a random number"


def test_every_row_of_a_draft_is_scored_whatever_its_tokens_and_whoever_else_is_in_the_batch(
    target: Opened,
) -> None:
    client, executor = target
    texts = [[at + 1, 7, 2] for at in range(8)]
    last = VOCAB - 1
    drafts = [
        *([int(fake.mock_logits(text, 0.0).argmin()), last, at % VOCAB] for at, text in enumerate(texts[:5])),
        [1, 2],
        [],
        [],
    ]
    for _ in range(3):
        for text, draft, rows in zip(texts, drafts, client.logits(texts, drafts), strict=True):
            assert rows is not None
            assert torch.equal(rows, expected(text, draft))
    assert executor.iterations == [8] * 3
    client, _ = open_client(replace(make_spec("target"), vocab_size=VOCAB), padded=VOCAB)
    draft = [VOCAB - 1, VOCAB - 2, VOCAB - 1, 0]  # draft logits must name an id that is not drafted
    (found,) = client.logits([[3, 2]], [draft])
    assert found is not None
    assert torch.equal(found, expected([3, 2], draft))


def test_a_text_as_long_as_the_engine_allows_is_scored_whole(target: Opened) -> None:
    text, draft = [1 + at % 7 for at in range(CAPACITY - DRAFT)], [1, 2, 3, 4]
    (rows,) = target[0].logits([text], [draft])
    assert rows is not None
    assert torch.equal(rows, expected(text, draft))


def test_what_the_library_generates_in_place_of_a_discarded_draft_is_not_believed(
    target: Opened,
) -> None:
    client, executor = target
    assert not executor.config.enable_chunked_context
    executor.config.enable_chunked_context, executor.config.max_num_tokens = True, 60
    texts = [[at + 1] * length for at, length in enumerate((30, 32, 31))]
    drafts = [[8, 9, 10, 8]] * 3
    found = client.logits(texts, drafts)
    assert executor.counts["discarded"] == 2 + 4 + 3
    for text, draft, rows in zip(texts, drafts, found, strict=True):
        assert rows is not None
        assert torch.equal(rows, expected(text, draft)[: len(rows)])
    assert [len(rows) for rows in found if rows is not None] == [3, 1, 2]


def test_all_requests_of_a_block_run_in_one_iteration_where_sizes_are_the_exported_ones() -> None:
    spec = make_spec("target", rows=3, beam_width=3)
    texts = [[1 + at % 7 for at in range(CAPACITY - DRAFT)]] * 9
    for tokens, blocks, most in ((spec.max_num_tokens, spec.kv_tokens, 9), (1200, spec.kv_tokens, 4), (2304, 640, 2)):
        client, executor = open_client(replace(spec, max_num_tokens=tokens, kv_tokens=blocks))
        assert None not in client.logits(texts, [[1, 2, 3, 4]] * 9)
        assert max(executor.iterations) == most


def test_an_executor_keeps_one_beam_width_and_the_fake_corrupts_where_it_changes() -> None:
    client, executor = open_client(make_spec("auxiliary"))
    config = executor.config
    assert (config.max_beam_width, config.extended_runtime_perf_knob_config.cuda_graph_cache_size) == (4, 4)
    before = client.search([[3, 1, 2]], [3])
    (rows,) = client.logits([[3, 1, 2]], [[]])
    assert rows is not None
    assert torch.equal(rows, expected([3, 1, 2], []))
    assert client.search([[3, 1, 2]], [3]) == before
    assert not executor.counts["corrupt"]
    answers(executor, raw([3, 1, 2]))
    assert client.search([[3, 1, 2]], [3]) != before
    assert executor.counts["corrupt"]


def test_a_text_is_computed_once_and_then_no_more_than_a_block_of_it(
    target: Opened,
) -> None:
    client, executor = target
    text = [1 + at % 9 for at in range(100)]
    client.logits([text], [[1, 2, 3]])
    before = executor.counts["computed"]
    assert before >= 103
    client.logits([[*text, 1, 2, 5]], [[1, 2, 3]])  # two of three were kept, and a token of the target's own
    assert executor.counts["computed"] - before <= 1 + 3
    auxiliary, executor = open_client(make_spec("auxiliary"))
    for count in (100, 103):
        before = executor.counts["computed"]
        auxiliary.search([text[:count] + [2] * (count - 100)], [3])
    assert executor.counts["computed"] - before <= fake.BLOCK + 3, "beams store whole blocks of the prompt"


def test_an_error_is_that_requests_alone_and_logged(target: Opened, caplog: pytest.LogCaptureFixture) -> None:
    client, executor = target
    executor.faults = [None, "error", None]
    found = client.logits([[1, 2], [3, 4], [5, 6]], [[1], [2], [3]])
    assert [rows is None for rows in found] == [False, True, False]
    assert "injected" in caplog.text
    assert client.logits([[1] * (CAPACITY + 1)], [[]]) == [None]
    assert client.logits([], []) == []


def test_requests_of_an_interrupted_block_are_cancelled_and_their_late_answers_dropped(
    target: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, executor = target

    def interrupted(self: fake.Executor, timeout: object = None) -> list[fake.Response]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fake.Executor, "await_responses", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.logits([[1, 2], [3, 4]], [[1], [2]])
    assert executor.counts["cancelled"] == 2
    (rows,) = client.logits([[1, 2]], [[5]])
    assert rows is not None
    assert torch.equal(rows, expected([1, 2], [5]))


def test_executors_are_opened_as_the_library_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("target", "auxiliary"):
        spec = make_spec(role)
        _, executor = open_client(spec)
        config = executor.config
        assert config.kv_cache_config.enable_block_reuse
        assert config.kv_cache_config.max_tokens == spec.kv_tokens
        assert config.kv_cache_config.free_gpu_memory_fraction is None
        assert config.gather_generation_logits
        assert not config.normalize_log_probs
        assert config.extended_runtime_perf_knob_config.cuda_graph_mode == (role == "auxiliary")
        assert config.parallel_config.orchestrator_config is None
    module = ModuleType("tensorrt_llm")
    module.__file__ = "/packages/tensorrt_llm/__init__.py"
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_llm", module)
    _, executor = open_client(replace(make_spec("target"), tensor_parallel=2))
    parallel = executor.config.parallel_config
    assert parallel.device_ids == [0, 1]
    assert parallel.communication_mode is fake.CommunicationMode.ORCHESTRATOR
    assert parallel.orchestrator_config.worker_executable_path == "/packages/tensorrt_llm/bin/executorWorker"
