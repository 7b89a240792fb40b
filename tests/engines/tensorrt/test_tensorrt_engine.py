"""The TensorRT engine, on a stand-in for the runtime whose signatures are those of TensorRT-RTX."""

from __future__ import annotations

import functools
import gc
import inspect
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import tensorrt_rtx
import torch
from transformers import LlamaForCausalLM

import engines.tensorrt.engine
import engines.tensorrt_plan
from engines.base import EngineSpec
from engines.cache.columns import index_columns
from engines.folder import cache_folder, read_spec
from engines.onnx.engine import OnnxRuntimeEngine
from engines.tensorrt.engine import TensorRTEngine
from engines.tensorrt_plan import Gpu
from export.verification.verify import TOLERANCE, expect, verify
from mtad import LLM, RuntimeConfig
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime.decoder.engine_role import EngineRole
from runtime.pair import open_pair
from tests.support import fake_tensorrt
from tests.support.quick_filters import quick_filters
from tests.support.replayed import ReplayRecorder
from tests.support.steps import make_step, more_tokens, some_tokens
from tests.support.tensorrt import ADA, PLAN, SPEC

pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture(params=[("tensorrt-rtx", "operator"), ("tensorrt", "decomposed")])
def engine(request: pytest.FixtureRequest, target_graphs: dict[str, Path], tmp_path: Path) -> TensorRTEngine:
    format, attention = request.param
    plan = replace(PLAN, gpu=ADA.name) if format == "tensorrt" else PLAN
    spec = replace(SPEC, format=format, attention=attention, plan=plan)
    fake_tensorrt.write_plan(tmp_path / "model.engine", target_graphs[attention] / "model.onnx", spec, plan)
    return opened(tmp_path, spec)


def opened(folder: Path, spec: EngineSpec) -> TensorRTEngine:
    """An engine on the stand-in."""
    return TensorRTEngine(folder, spec, fake_tensorrt, "cpu")  # type: ignore[arg-type]


def test_the_engine_computes_what_the_checkpoint_computes(engine: TensorRTEngine, reference: LlamaForCausalLM) -> None:
    assert verify(engine, expect(reference, engine.spec)) <= TOLERANCE["float32"]
    assert (engine.spec.capacity, engine.cache.kv.shape[4]) == (SPEC.capacity - 128, SPEC.capacity)


@pytest.fixture
def plain(target_graphs: dict[str, Path]) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(target_graphs["operator"], SPEC, 1)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_long_prompts_run_in_pieces_and_drafts_as_graphs(engine: TensorRTEngine, plain: OnnxRuntimeEngine) -> None:
    for row, length in enumerate((100, 5, 33, 64)):
        step = make_step(some_tokens(row, length)[None], [0], first_row=row, keep=[0, length - 1])
        same(engine.step(step), plain.step(step))
    contexts = len(engine._contexts)
    for at in (100, 102, 104):
        step = make_step(more_tokens(4, 2), [at, at - 95, at - 67, at - 36])
        same(engine.step(step), plain.step(step))
    assert len(engine._contexts) == contexts + 1
    same(engine.cache.kv, plain.cache.kv)


def test_what_was_compiled_is_kept_for_the_next_process(target_graphs: dict[str, Path], tmp_path: Path) -> None:
    spec = replace(SPEC, format="tensorrt-rtx", plan=PLAN, build_hash="kept")
    fake_tensorrt.write_plan(tmp_path / "model.engine", target_graphs["operator"] / "model.onnx", spec, PLAN)
    first = opened(tmp_path, spec)
    assert first._decode
    first._decode.cache.blob = b"kernels of a shape"
    del first
    gc.collect()
    assert (cache_folder() / "tensorrt-rtx" / "kept.kernels").read_bytes() == b"kernels of a shape"
    second = opened(tmp_path, spec)
    assert second._decode
    assert second._decode.cache.blob == b"kernels of a shape"


def test_prompts_do_not_wait_for_kernels_of_their_shape_and_blocks_do(
    target_graphs: dict[str, Path], tmp_path: Path
) -> None:
    """A graph would keep those that run meanwhile."""
    spec = replace(SPEC, format="tensorrt-rtx", plan=PLAN)
    fake_tensorrt.write_plan(tmp_path / "model.engine", target_graphs["operator"] / "model.onnx", spec, PLAN)
    engine = opened(tmp_path, spec)
    engine.step(make_step(some_tokens(0, 100)[None], [0]))
    engine.step(make_step(more_tokens(4, 2), [100, 0, 0, 0]))
    prompts, *blocks = (one.name for one in engine._engine.specializations)
    assert (prompts, set(blocks)) == ("LAZY", {"EAGER"})


def test_a_plan_that_is_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    for held in (b"", b"{"):
        (tmp_path / "model.engine").write_bytes(held)
        with pytest.raises(InvalidInput, match="the runtime cannot load it"):
            opened(tmp_path, replace(SPEC, format="tensorrt-rtx", plan=PLAN))


def test_contexts_are_bounded_outlive_what_runs_there_and_void_their_graphs(
    engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines.tensorrt.engine, "MAX_CONTEXTS", 5)
    kept = [weakref.ref(context) for context in engine._engine.contexts]
    engine._engine.contexts.clear()  # only the engine keeps them now
    shapes = [(steps, some, length) for steps in range(1, 4) for some in range(1, steps + 1) for length in (64, 128)]
    stand_on = engine.captured_on
    for number, (steps, some, length) in enumerate(shapes[:11]):
        assert (engine.captured_on is stand_on) == (number <= 5)
        step = make_step(more_tokens(2, steps), [4, 9], keep=[0] * some)
        engine.step(replace(step, mask=torch.nn.functional.pad(step.mask, (0, length - step.mask.shape[3]))))
        kept += map(weakref.ref, engine._engine.contexts)
        engine._engine.contexts.clear()
        if number == 6:
            stand_on = None
    assert sum(context() is not None for context in kept) == 7, "that of prompts, five that went, and the last shape's"


def test_a_step_that_fails_does_not_leave_its_shape_unusable(
    engine: TensorRTEngine, plain: OnnxRuntimeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(more_tokens(4, 2), [0, 0, 0, 0])
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "of", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            engine.step(step)
    same(engine.step(step), plain.step(step))


def test_padded_rows_write_into_the_cache_however_wide_the_step(engine: TensorRTEngine) -> None:
    tokens, capacity = some_tokens(0, 2 * PLAN.prefill_tokens)[None], engine.spec.capacity
    engine.cache.kv[:, :, 1] = 7
    for at in (capacity, capacity + 100):
        step = make_step(tokens, [0], keep=[0])
        engine.step(replace(step, write_at=torch.tensor([at])))
    assert (engine.cache.kv[:, :, 1] == 7).all()


@pytest.mark.slow
def test_a_block_of_plans_is_one_graph_and_gives_the_tokens_of_the_graphs_that_they_are_made_of(
    pair_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rows are padded, and write behind the capacity; a constraint takes the batch to the host, on graphs of steps."""
    plain, engines = open_pair(pair_folders("onnx"), RuntimeConfig(provider="cpu")), []
    for name in ("target", "auxiliary"):
        graph, plan = pair_folders("onnx") / name, replace(PLAN, decode_tokens=33, gpu=ADA.name)
        (folder := tmp_path / name).mkdir()
        spec = replace(read_spec(graph), format="tensorrt", plan=plan)
        fake_tensorrt.write_plan(folder / "model.engine", graph / "model.onnx", spec, plan)
        engines.append(opened(folder, spec))
        engines[-1].cache._move = functools.partial(index_columns, engines[-1].cache.kv)  # as on a GPU
    recorder, config = ReplayRecorder(), RuntimeConfig(max_draft_len=4, prefix_tokens=0)
    device = LLM(replace(plain, target=engines[0], auxiliary=engines[1]), config, recorder=recorder, record=())
    base, prompts = DecodingParams(max_tokens=8, ignore_eos=True, draft_len=3), ["SELECT name", "def f(x):", "where"]
    params = [replace(base, method=name, seed=seed) for seed, name in enumerate(("mtad", "speculative", "mtad"))]
    assert device.blocks
    for own, reasons in ((base, set()), (replace(base, min_tokens=4), {"constraints are followed on the host"})):
        asked = [*params[:2], replace(own, seed=2)]
        with quick_filters():
            found, expected = (llm.generate(prompts, asked) for llm in (device, LLM(plain, config)))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert set(device.blocks.unrecorded) == reasons
    assert recorder.recorded > len(device.blocks._blocks) > 0


def test_scored_prompts_take_no_contexts(engine: TensorRTEngine, plain: OnnxRuntimeEngine) -> None:
    """Their shapes are many; contexts are kept for blocks that may be captured, and are few."""
    for length in (5, 70, 130):
        tokens = some_tokens(length, length).tolist()
        ours, theirs = ([*EngineRole(one, SPEC.vocab_size).logits(0, tokens, 0)] for one in (engine, plain))
        same(torch.cat(ours), torch.cat(theirs))
    assert not engine._contexts


def test_addresses_are_aligned_as_the_runtime_asks(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocations begin at multiples of 512 bytes on a GPU; what begins elsewhere in one has to as well."""
    given: dict[str, int] = {}
    monkeypatch.setattr(
        fake_tensorrt.IExecutionContext,
        "set_tensor_address",
        lambda self, name, memory: self._addresses.update({name: memory}) or given.update({name: memory}) or True,
    )
    memory, step = torch.zeros(3, dtype=torch.int64), make_step(more_tokens(1, 1), [3], keep=[0])
    engine.enqueue(replace(step, keep=memory[1:2]))
    assert given["keep"] != memory[1:].data_ptr()
    new = [address for name, address in given.items() if name.startswith("new_")]
    assert not [address for address in new if (address - min(new)) % 256]


def test_steps_wider_than_the_profile_run_a_row_at_a_time(engine: TensorRTEngine, plain: OnnxRuntimeEngine) -> None:
    step = make_step(torch.stack([some_tokens(row, 40) for row in range(3)]), [0, 3, 9], keep=[39, 0, 35])
    same(engine.step(step), plain.step(step))


def test_more_rows_than_the_plan_has_are_refused(target_graphs: dict[str, Path], tmp_path: Path) -> None:
    spec = replace(SPEC, format="tensorrt-rtx", plan=PLAN, rows=5)
    with pytest.raises(InvalidInput, match="built for 4 rows"):
        opened(tmp_path, spec)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_what_the_runtime_refuses_is_an_error(engine: TensorRTEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_tensorrt.IExecutionContext, "execute_async_v3", lambda self, stream_handle: False)
    with pytest.raises(RuntimeError, match="refused the enqueue"):
        engine.step(make_step(more_tokens(1, 2), [3]))


def test_a_plan_that_does_not_alias_its_caches_is_an_error(
    target_graphs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, format="tensorrt-rtx", plan=PLAN)
    fake_tensorrt.write_plan(tmp_path / "model.engine", target_graphs["operator"] / "model.onnx", spec, PLAN)
    monkeypatch.setattr(fake_tensorrt.ICudaEngine, "get_aliased_input_tensor", lambda self, name: None)
    with pytest.raises(RuntimeError, match=r"alias of present_key\.0"):
        opened(tmp_path, spec)


def _signatures(function: Any) -> list[list[str]]:
    """Parameter names of a binding's overloads, as its documentation begins."""
    found = re.findall(r"^(?:\d+\. )?\w+\(self: [\w.]+,? ?(.*)\) ->", function.__doc__, re.MULTILINE)
    return [re.findall(r"(\w+): (?!\d)", parameters) for parameters in found]


@pytest.mark.parametrize("name", ["Runtime", "ICudaEngine", "IExecutionContext", "IRuntimeConfig", "IRuntimeCache"])
def test_the_stand_in_has_the_runtimes_signatures(name: str) -> None:
    fake, real = getattr(fake_tensorrt, name), getattr(tensorrt_rtx, name)
    for method, function in vars(fake).items():
        if not method.startswith("_"):
            ours = list(inspect.signature(function).parameters)[1:]
            assert ours in _signatures(getattr(real, method)), f"{name}.{method}"
    if name == "IRuntimeConfig":
        assert vars(fake()).keys() - {"strategy", "cache"} <= set(dir(real))
        for choice in ("ExecutionContextAllocation", "DynamicShapesKernelSpecialization", "CudaGraph"):
            ours, theirs = (getattr(module, f"{choice}Strategy") for module in (fake_tensorrt, tensorrt_rtx))
            assert set(ours.__members__) <= set(theirs.__members__)


def test_a_plan_belongs_to_the_gpu_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, spec = Mock(), replace(SPEC, format="tensorrt-rtx", plan=PLAN)
    monkeypatch.setattr(torch.cuda, "set_device", calls.chosen)
    monkeypatch.setattr(engines.tensorrt.engine, "current_gpu", calls.seen)
    calls.seen.return_value = ADA
    engines.tensorrt.engine.runtime_of(spec, Mock(on_gpu=True, device="cuda:1"))
    assert calls.mock_calls == [call.chosen("cuda:1"), call.seen()]


def test_a_gpu_is_named_as_torch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or engines.tensorrt_plan.current_gpu() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 5090")
    assert engines.tensorrt_plan.current_gpu() == Gpu("NVIDIA GeForce RTX 5090", "12.0")
