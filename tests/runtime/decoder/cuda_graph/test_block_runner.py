"""Blocks on a device: recorded, padded, replayed, they give the tokens that the host's give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines.capture import Recorder
from mtad.params import DecodingParams
from runtime.decoder.buckets import Buckets
from tests.runtime.test_schedules import CAPACITY, alone
from tests.support.device_loop import Device, input_of, pool
from tests.support.mock_engine import CapturableMock, MockEngine, PagedMock
from tests.support.replayed import NoReads, ReplayRecorder

pytestmark = pytest.mark.usefixtures("quick")


class Copies(TorchDispatchMode):
    """Counts copies to the memory that the host reads."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self.count = device, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.overloadpacket is torch.ops.aten.copy_:
            self.count += (
                args[0].untyped_storage().data_ptr() == self._device.of_the_host[1].untyped_storage().data_ptr()
            )
        return result


@pytest.mark.parametrize(
    ("seed", "engine"),
    [pytest.param(0, CapturableMock, marks=pytest.mark.slow), (3, partial(PagedMock, pages=6))],
)
def test_recorded_blocks_give_every_request_the_tokens_it_gets_alone_on_the_host(
    seed: int, engine: Callable[..., MockEngine]
) -> None:
    """Methods mixed; rows join and leave; prompts are stored beside padded rows; several lengths of masks."""
    chance = random.Random(seed)
    sizes = chance.choice([3, 4, 6]), ReplayRecorder(), chance.choice([3, 64]), chance.choice([0, 256])
    device = Device(*sizes, engine)
    chosen = chance.sample(pool(), 4)
    found = device.generate([entry[:2] for entry in chosen], chance)
    for request, (_, params, tokens, log_probs) in zip(found, chosen, strict=True):
        assert request.tokens == tokens, params
        assert request.log_probs == pytest.approx(log_probs, abs=1e-5)
    assert not device.blocks.unrecorded
    assert device.recorder.replayed > len(device.blocks._blocks) > 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["sample", "mmtad"])
@pytest.mark.slow
def test_the_host_waits_once_a_block_and_reads_one_copy(method: str) -> None:
    rows, asked = 3, DecodingParams(method=method, draft_len=2, beam_width=2, draft_confidence=0.1)
    device = Device(4, recorder := ReplayRecorder())
    params = [replace(asked, seed=row) for row in range(rows)]
    for _ in range(3):
        given = input_of(params)
        before = recorder.waits
        with torch.inference_mode(), NoReads(lambda: device.of_the_host) as reads, Copies(device) as copies:
            block = device.blocks.run(given)
        assert recorder.waits == before + 1
        assert copies.count == 1
        assert reads.count
        assert len(block.tokens) == len(block.log_probs) == len(block.drafted_levels) == len(block.finite) == rows
    assert (len(device.blocks._blocks), recorder.replayed) == (1, 3)


def test_blocks_are_padded_as_far_as_costs_nothing_and_to_masks_that_an_engine_has_to_read() -> None:
    plain, chain, tree = 1, 5, 17  # tokens of the widest step
    assert [Buckets(16, 4096).counts(tokens) for tokens in (plain, chain, tree)] == [[1, 16], [1, 16], [1, 4, 16]]
    assert [Buckets(64, 4096).counts(tokens) for tokens in (plain, chain)] == [[1, 64], [1, 16, 64]]
    assert [Buckets(rows, 4096).counts(tree) for rows in (1, 2, 5, 12)] == [[1], [1, 2], [1, 5], [1, 3, 12]]
    assert [Buckets(16, 4096).padded(rows, tree) for rows in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]
    assert Buckets(16, 4096, reads_mask=False).lengths == [4096]
    assert Buckets(16, 4096).lengths == [1024, 4096]
    assert Buckets(16, 320).lengths == [320]
    assert [Buckets(16, 4096).length(end) for end in (13, 1024, 1025, 4096)] == [1024, 1024, 4096, 4096]


@pytest.mark.parametrize(
    ("engine", "recorder", "reason"),
    [
        (MockEngine, ReplayRecorder, "steps of MockEngine cannot be part of a recording"),
        (CapturableMock, partial(Recorder, "cpu"), "graphs are switched off"),
    ],
)
def test_what_cannot_be_captured_runs_on_the_host_and_is_counted(
    engine: Callable[..., MockEngine], recorder: Callable[[], Recorder], reason: str
) -> None:
    device = Device(4, recorder(), engine=engine)
    chosen = pool()[:13]
    found = device.generate([entry[:2] for entry in chosen], random.Random(3))
    assert [request.tokens for request in found] == [entry[2] for entry in chosen]
    assert not device.blocks._blocks
    assert set(device.blocks.unrecorded) == {reason}
    assert device.loop.totals.unrecorded == device.blocks.unrecorded


def test_without_triton_and_beside_a_method_of_the_host_blocks_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(4, ReplayRecorder())
    captured, other = (DecodingParams(method=method, seed=1, draft_len=4) for method in ("mtad", "traversal"))
    assert device.blocks.eager_reason(input_of([captured, captured])) is None
    assert device.blocks.eager_reason(input_of([captured, other])) == "traversal runs on the host"
    looked_up = replace(captured, draft="lookup")
    assert device.blocks.eager_reason(input_of([captured, looked_up])) == "drafts are looked up on the host"
    detailed = replace(captured, draft_details=True)
    assert device.blocks.eager_reason(input_of([captured, detailed])) == "details of drafts are read on the host"
    monkeypatch.setattr("mtad.device.launches.problem", lambda: "Triton is not installed")
    assert device.blocks.eager_reason(input_of([captured])) == "Triton is not installed"
    assert device.blocks.problem


def test_constrained_blocks_run_on_the_host_on_graphs_of_steps_and_give_the_tokens_of_the_host() -> None:
    params = DecodingParams(method="mmtad", seed=3, max_tokens=12, min_tokens=9, logit_bias={4: 2.0}, ignore_eos=True)
    params = replace(params, repetition_penalty=1.3, frequency_penalty=0.2, draft_len=4)
    prompt, plain = [5, 3, 7], pool()[0]
    expected = alone(prompt, params)
    device = Device(4, recorder := ReplayRecorder())
    found = device.generate([(prompt, params), plain[:2], (prompt, replace(params, seed=4))], random.Random(1))
    assert recorder.recorded > len(device.blocks._blocks), "each step is a graph"
    assert recorder.replayed > 2 * recorder.recorded
    assert found[0].tokens == expected.tokens
    assert found[1].tokens == plain[2]
    assert set(device.blocks.unrecorded) == {"constraints are followed on the host"}


@pytest.mark.slow
@pytest.mark.parametrize("recorder", [ReplayRecorder, partial(Recorder, "cpu")])
def test_prepared_blocks_are_not_recorded_when_they_come(recorder: Callable[[], Recorder]) -> None:
    device = Device(3, recorder())
    params = DecodingParams(method="mmtad", draft_len=3, beam_width=2, seed=1, max_tokens=8, ignore_eos=True)
    device.blocks.prepare([params])
    before = dict(device.blocks._blocks)
    assert len(before) == (0 if device.blocks.problem else 2)  # of 1 and of 3 rows
    sizes = [key.size for key in before]
    assert sizes == sorted(sizes, reverse=True)
    assert not device.target.cache.kv.any()
    device.generate([([4, 5], params), ([6], replace(params, seed=2)), ([9] * 70, params)], random.Random(2))
    assert dict(device.blocks._blocks) == before
    assert bool(device.blocks.unrecorded) == bool(device.blocks.problem)


@pytest.mark.slow
def test_a_padded_row_writes_behind_the_capacity_only() -> None:
    """Row 3 of four is padding, and holds a prompt that is being stored. A chain, beams, and graphs of steps."""
    device = Device(4, ReplayRecorder())
    for method in ("block", "mmtad", "traversal"):
        for engine in (device.auxiliary, device.target):
            engine.cache.kv.normal_()
        before = [engine.cache.kv[:, :, 3, :, :CAPACITY].clone() for engine in (device.auxiliary, device.target)]
        params = DecodingParams(method=method, draft_len=2, beam_width=2, branching=(2, 1), seed=1)
        for _ in range(2):
            with torch.inference_mode():
                device.blocks.run(input_of([params] * 3))
        for engine, kept in zip((device.auxiliary, device.target), before, strict=True):
            assert torch.equal(engine.cache.kv[:, :, 3, :, :CAPACITY], kept), method
