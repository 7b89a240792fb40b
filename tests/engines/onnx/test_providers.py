"""ONNX Runtime on a GPU: what is asked of it, what it gives, and that nothing falls back to the CPU."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import onnx
import onnxruntime as ort
import pytest
import torch

import engines.onnx.engine as module
from engines import capture
from engines.base import EngineSpec
from engines.kinds import kind_of
from engines.onnx.binding import Binding
from engines.onnx.engine import OnnxRuntimeEngine, open_onnxruntime
from engines.onnx.providers import check_cuda
from engines.placement import Placement
from mtad.errors import InvalidInput
from tests.support.fake_onnxruntime import CPU, CUDA, Session, Stream, ordered
from tests.support.steps import LENGTHS, make_step, more_tokens, some_tokens
from tests.support.tensorrt import SPEC

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


@pytest.fixture(scope="module")
def folder(target_graphs: dict[str, Path]) -> Path:
    return target_graphs["operator"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, as far as torch is asked; sessions of the CUDA provider run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def opened(folder: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> OnnxRuntimeEngine:
    """An engine of the CUDA provider whose memory is the CPU's."""
    monkeypatch.setattr(ort, "InferenceSession", Session)
    monkeypatch.setattr(module, "ordered", ordered)
    stream: Any = Stream()
    return OnnxRuntimeEngine(folder, spec, 1, stream=stream)


@pytest.mark.parametrize("attention", ["operator", "decomposed"])
def test_the_logits_and_the_cache_are_the_cpus(
    target_graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    folder, spec = target_graphs[attention], replace(SPEC, attention=attention)
    theirs = OnnxRuntimeEngine(folder, spec, 1)
    ours = opened(folder, spec, monkeypatch)
    for row, length in enumerate(LENGTHS):
        step = make_step(some_tokens(row, length)[None], [0], first_row=row, keep=[])
        assert ours.step(step).shape == theirs.step(step).shape
    for write_at in (LENGTHS, [length + 5 for length in LENGTHS]):
        for rows, steps in ((4, 1), (2, 5), (4, 3), (1, 1)):
            step = make_step(more_tokens(rows, steps), write_at[:rows])
            torch.testing.assert_close(ours.step(step), theirs.step(step), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.cache.kv, theirs.cache.kv, rtol=1e-5, atol=1e-5)


def test_the_stand_in_has_the_signatures_of_the_session() -> None:
    for name in ("__init__", "run_with_iobinding", "get_providers"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (Session, ort.InferenceSession))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_a_session_is_opened_for_the_gpu_and_its_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened(folder, SPEC, monkeypatch)._session
    assert isinstance(session, Session)
    assert set(session.config.values()) == {"1"}
    assert session.asked == {
        CUDA: {
            "device_id": "0",
            "user_compute_stream": "7",
            "use_tf32": "0",
        }
    }


def test_an_operator_without_a_kernel_is_refused_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "missing", frozenset({"TensorScatter", "Attention"}))
    with pytest.raises(InvalidInput, match=r"leaves 2 Attention, 4 TensorScatter on the CPU, .*; export with"):
        opened(folder, SPEC, monkeypatch)


def test_an_operator_that_also_computes_shapes_may_do_nothing_else_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "missing", frozenset({"Reshape"}))
    layers = sum(node.op_type == "Reshape" for node in onnx.load(folder / "model.onnx").graph.node)
    with pytest.raises(InvalidInput, match=r"leaves \d+ Reshape on the CPU") as refused:
        opened(folder, SPEC, monkeypatch)
    assert 0 < int(re.findall(r"(\d+) Reshape", str(refused.value))[0]) < layers, "those of shapes may be there"


@pytest.mark.usefixtures("gpu")
def test_an_onnx_runtime_without_the_provider_is_named_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    with pytest.raises(InvalidInput, match=r"no CUDAExecutionProvider; install the extra cuda, .*onnxruntime-gpu"):
        check_cuda()


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="there are 1 GPUs"):
        Placement("cuda:1")


@WITHOUT_GPU
@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="onnxruntime without its GPU providers")
@pytest.mark.usefixtures("gpu")
def test_a_provider_that_cannot_be_loaded_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device, cuda_stream=0))
    with pytest.raises(InvalidInput, match=r"(?s)provider = 'cuda': .*could not load it"):
        open_onnxruntime(folder, SPEC, Placement("cuda", provider="cuda"))


@pytest.mark.parametrize(
    ("provider", "device", "chosen"),
    [(None, "cpu", "cpu"), (None, "cuda:1", "cuda"), ("cpu", "cpu", "cpu"), ("cuda", "cuda", "cuda")],
)
def test_a_devices_provider_is_its_own_unless_another_is_asked_for(
    provider: str | None, device: str, chosen: str
) -> None:
    assert kind_of("onnx", provider, device).provider == chosen


@pytest.mark.parametrize(("provider", "device"), [("cuda", "cpu"), ("cpu", "cuda"), ("rocm", "cuda")])
def test_a_provider_of_another_device_is_refused(provider: str, device: str) -> None:
    with pytest.raises(InvalidInput, match="provider = "):
        kind_of("onnx", provider, device)


def test_a_sessions_stream_is_ordered_with_the_callers_even_if_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.caller)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with suppress(ZeroDivisionError), capture.ordered(streams.own):
        assert streams.mock_calls == [call.own.wait_stream(streams.caller)]
        raise ZeroDivisionError
    assert streams.mock_calls[1:] == [call.caller.wait_stream(streams.own)]


class OnGpu(torch.Tensor):
    """A tensor that says it is on the second GPU."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


def test_memory_is_bound_where_it_lies_in_every_type() -> None:
    calls: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(bind_input=lambda *args: calls.append(args), bind_output=lambda *args: calls.append(args))
    bound = Binding(SimpleNamespace(io_binding=lambda: fake))
    memory = torch.zeros(2, 3, dtype=torch.bfloat16).as_subclass(OnGpu)
    bound.output("logits", memory)
    bound.input("tokens", torch.zeros(4, dtype=torch.int64))
    parameters = list(inspect.signature(ort.IOBinding.bind_input).parameters)[1:]
    assert parameters == ["name", "device_type", "device_id", "element_type", "shape", "buffer_ptr"]
    assert parameters == list(inspect.signature(ort.IOBinding.bind_output).parameters)[1:]
    assert calls[0] == ("logits", "cuda", 1, 16, (2, 3), memory.data_ptr())
    assert calls[1][:5] == ("tokens", "cpu", 0, 7, (4,))
