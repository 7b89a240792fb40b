"""Captures that break off, waits that are found, and what lives as long as a recording."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from engines.base import Step
from engines.capture import CudaRecorder, Uncapturable, waits_are_errors
from mtad.params import DecodingParams
from tests.support.device_loop import Device, pool
from tests.support.fake_cuda import FakeTorchCuda
from tests.support.mock_engine import CapturableMock
from tests.support.replayed import ReplayRecorder

pytestmark = pytest.mark.usefixtures("quick")


def test_a_mixture_that_looks_at_its_routing_is_found_out_and_runs_on_the_host() -> None:
    class Looking(CapturableMock):
        def step(self, step: Step) -> Tensor:
            return self.run(step) * float(step.tokens.float().mean() >= 0)

    device = Device(2, ReplayRecorder())
    device.target.__class__ = Looking
    entry = pool()[4]
    (found,) = device.generate([entry[:2]], random.Random(0))
    assert found.tokens == entry[2]
    assert not device.blocks._blocks
    ((reason, count),) = device.loop.totals.unrecorded.items()
    assert reason == "__float__ of a tensor of the device"
    assert count == found.blocks


def test_a_capture_that_breaks_off_ends_in_a_block_of_the_host_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = "CUDA error: operation not permitted when stream is capturing"
    cuda = FakeTorchCuda(monkeypatch, problem + "\nCUDA kernel errors might be asynchronously reported")
    device = Device(3, CudaRecorder("cuda"))
    params = [entry[1] for entry in pool()[:2]]
    device.blocks.prepare(params)
    prepared, chosen = cuda.captures, pool()[:6]
    found = device.generate([entry[:2] for entry in chosen], random.Random(4))
    assert [request.tokens for request in found] == [entry[2] for entry in chosen]
    assert not device.blocks._blocks
    assert set(device.blocks.unrecorded) == {problem}
    said = [record.getMessage() for record in caplog.records if record.name.startswith("runtime.decoder.cuda_graph")]
    assert [message for message in said if "on the host" in message] == [
        f"blocks run on the host, not as CUDA graphs: {problem}"
    ]
    before = cuda.captures
    device.generate([entry[:2] for entry in chosen[:1]], random.Random(4))
    device.generate([entry[:2] for entry in chosen[:1]], random.Random(4))
    assert prepared <= before <= cuda.captures <= before + 3, "a kind of block is tried once"


def test_a_wait_is_found_before_anything_is_captured_and_torch_checks_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeTorchCuda(monkeypatch)
    recorder = CudaRecorder("cuda")
    with pytest.raises(Uncapturable, match="synchronizing"):
        recorder.record(cuda.wait)
    assert (cuda.captures, cuda.mode) == (0, "default")
    recorder.record(lambda: None)
    assert (cuda.captures, cuda.mode) == (1, "default")
    with pytest.raises(ZeroDivisionError):  # the work's own, which it raises without graphs as well
        recorder.record(lambda: 1 / 0)  # type: ignore[arg-type, return-value]


def test_a_wait_for_blocks_is_none_of_the_waits_that_a_capture_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTorchCuda(monkeypatch)
    recorder = CudaRecorder("cuda")
    with waits_are_errors(), recorder.ordered():
        recorder.wait()
    event: Mock = torch.cuda.current_stream().record_event()  # type: ignore[assignment]
    event.synchronize.assert_called_once()


def test_a_graph_that_is_dropped_gives_its_memory_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTorchCuda(monkeypatch)
    device = Device(1, CudaRecorder("cuda"))
    device.blocks.prepare([DecodingParams(method="sample")])
    block = weakref.ref(next(iter(device.blocks._blocks.values()))[0])
    gc.disable()
    device.blocks._blocks.clear()
    gc.enable()
    assert block() is None


class TestTheStandIn:
    """Recorded operations: what a graph would do, and what it would refuse."""

    def test_a_replay_runs_no_python_and_writes_where_the_results_lay(self) -> None:
        given, kept, branch = torch.tensor([1.0, 2.0]), [], [1.0]

        def work() -> None:
            kept.append((given + branch[0]).sort(descending=True).values)

        recorder = ReplayRecorder()
        with recorder.ordered():
            replay = recorder.record(work)
            branch[0] = 100.0
            given.copy_(torch.tensor([7.0, 9.0]))
            replay()
        assert len(kept) == 2
        assert kept[1].tolist() == [10.0, 8.0]

    @pytest.mark.parametrize(
        "look",
        [
            lambda x: x.any().item(),
            lambda x: bool(x.any()),
            lambda x: x.tolist(),
            lambda x: x.numpy(),
        ],
    )
    def test_work_that_looks_at_its_tensors_cannot_be_recorded(self, look: Callable[[Tensor], object]) -> None:
        recorder = ReplayRecorder()
        with recorder.ordered(), pytest.raises(Uncapturable):
            recorder.record(lambda: look(torch.ones(3)))  # type: ignore[arg-type, return-value]
