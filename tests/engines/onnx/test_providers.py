"""ONNX Runtime on a GPU: what is asked of it, what is captured, and that nothing falls back to the CPU."""

from __future__ import annotations

import gc
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest
import torch

import engines.onnx.engine as module
from engines.base import EngineSpec
from engines.kinds import kind_of
from engines.onnx import providers
from engines.onnx.binding import Binding, open_session
from engines.onnx.engine import OnnxRuntimeEngine, open_onnxruntime
from engines.onnx.providers import check_cuda, cuda_options
from engines.placement import Placement
from mtad.errors import InvalidInput
from tests.support.fake_cuda import FakeRecorder
from tests.support.fake_onnxruntime import CPU, CUDA, Session
from tests.support.steps import LENGTHS, make_step, more_tokens, some_tokens
from tests.support.tensorrt import SPEC

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


@pytest.fixture(scope="module")
def folder(target_graphs: dict[str, Path]) -> Path:
    return target_graphs["operator"]


@pytest.fixture
def spec() -> EngineSpec:
    return SPEC


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU, as far as torch is asked; sessions of the CUDA provider run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def opened(folder: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch, graphs: bool = True) -> OnnxRuntimeEngine:
    """An engine of the CUDA provider whose memory is the CPU's."""
    monkeypatch.setattr(ort, "InferenceSession", Session)
    options = cuda_options("cuda", 7, graphs)
    return OnnxRuntimeEngine(folder, spec, 1, options=options, recorder=FakeRecorder(), graphs=graphs)


@pytest.fixture
def engine(folder: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> OnnxRuntimeEngine:
    return opened(folder, spec, monkeypatch)


def session_of(engine: OnnxRuntimeEngine) -> Session:
    assert isinstance(engine._session, Session)
    return engine._session


def run_both(ours: OnnxRuntimeEngine, theirs: Any) -> None:
    """Prompts, then drafts and trees of several widths, twice."""
    for row, length in enumerate(LENGTHS):
        step = make_step(some_tokens(row, length)[None], [0], first_row=row, keep=[])
        assert ours.step(step).shape == theirs.step(step).shape
    for write_at in (LENGTHS, [length + 5 for length in LENGTHS]):
        for rows, steps in ((4, 1), (2, 5), (4, 3), (1, 1)):
            step = make_step(more_tokens(rows, steps), write_at[:rows])
            torch.testing.assert_close(ours.step(step), theirs.step(step), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.cache.kv, theirs.cache.kv, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("graphs", [True, False])
def test_captured_or_not_the_logits_and_the_cache_are_the_cpus(
    folder: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    theirs = OnnxRuntimeEngine(folder, spec, 1)
    ours = opened(folder, spec, monkeypatch, graphs)
    run_both(ours, theirs)
    session = session_of(ours)
    assert bool(session.recorded) == graphs
    assert set(session.ran) == ({-1} | set(session.recorded) if graphs else {-1})


def test_a_graph_without_the_operators_of_opset_24_gives_the_same(
    target_graphs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, attention="decomposed")
    theirs = OnnxRuntimeEngine(target_graphs["decomposed"], spec, 1)
    run_both(opened(target_graphs["decomposed"], spec, monkeypatch), theirs)


def test_each_bucket_has_a_graph_id_and_prompts_have_none(engine: OnnxRuntimeEngine) -> None:
    engine.step(make_step(some_tokens(0, 70)[None], [0], keep=[]))
    for at, steps in ((70, 2), (72, 2), (74, 1), (75, 1)):
        engine.step(make_step(some_tokens(at, steps)[None], [at]))
    assert session_of(engine).ran == [-1, 1, 1, 1, 2, 2, 2], "captured with the first run, then launched"


def test_a_row_in_the_middle_is_never_replayed(engine: OnnxRuntimeEngine) -> None:
    engine.step(make_step(more_tokens(1, 1), [3], first_row=2))
    assert session_of(engine).ran == [-1]


def test_a_graph_that_goes_is_given_back(engine: OnnxRuntimeEngine) -> None:
    assert engine.graphs is not None
    engine.graphs._graphs.max_size = 1
    for steps in (1, 2):
        engine.step(make_step(more_tokens(1, steps), [3]))
    gc.collect()
    assert list(session_of(engine).recorded) == [2]


def test_the_stand_in_has_the_signatures_of_the_session() -> None:
    for name in ("__init__", "run_with_iobinding", "release_captured_graph", "get_providers"):
        ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (Session, ort.InferenceSession))
        assert list(ours.parameters) == list(theirs.parameters), name


def test_a_session_is_opened_for_the_gpu_and_its_stream(engine: OnnxRuntimeEngine) -> None:
    session = session_of(engine)
    assert set(session.config.values()) == {"1"}
    assert session.asked == {
        CUDA: {
            "device_id": "0",
            "user_compute_stream": "7",
            "enable_cuda_graph": "1",
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": "0",
        }
    }


def test_an_operator_without_a_kernel_is_refused_and_named(
    folder: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "missing", frozenset({"TensorScatter", "Attention"}))
    with pytest.raises(InvalidInput, match=r"no CUDA kernel for 2 Attention, 4 TensorScatter; export with"):
        opened(folder, spec, monkeypatch)


@WITHOUT_GPU
def test_without_a_gpu_the_device_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"device = 'cuda': torch \S+ (was built without CUDA|finds no GPU)"):
        Placement("cuda")


@pytest.mark.usefixtures("gpu")
def test_an_onnx_runtime_without_the_provider_is_named_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU])
    with pytest.raises(InvalidInput, match=r"no CUDAExecutionProvider; .*onnxruntime-gpu: pip install 'mtad\[cuda\]'"):
        check_cuda()


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInput, match="there are 1 GPUs"):
        Placement("cuda:1")


@WITHOUT_GPU
@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="onnxruntime without its GPU providers")
@pytest.mark.usefixtures("gpu")
def test_a_provider_that_cannot_be_loaded_is_refused(
    folder: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SessionRecorder", lambda device: SimpleNamespace(stream=0))
    with pytest.raises(InvalidInput, match=r"(?s)provider = 'cuda': .*could not load it"):
        open_onnxruntime(folder, spec, Placement("cuda", provider="cuda"))


@WITHOUT_GPU
@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="onnxruntime without its GPU providers")
def test_left_to_itself_the_runtime_would_have_used_the_cpu(folder: Path) -> None:
    session = open_session(folder / "model.onnx", 1, providers=cuda_options("cuda", 0, True))
    assert session.get_providers() == [CPU]


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


@pytest.mark.usefixtures("gpu")
def test_an_engine_is_opened_with_the_providers_options(
    folder: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "SessionRecorder", lambda device: SimpleNamespace(stream=11, device=device))
    monkeypatch.setattr(module, "OnnxRuntimeEngine", lambda *args, **kwargs: made.append(kwargs))
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(providers.PROVIDERS.values()))
    for graphs in (True, False):
        open_onnxruntime(folder, spec, Placement("cuda", graphs=graphs))
    assert [kwargs["graphs"] for kwargs in made] == [True, False]
    assert all(kwargs["options"][0][1]["user_compute_stream"] == "11" for kwargs in made)


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
