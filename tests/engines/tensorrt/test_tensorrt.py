"""TensorRT: plans of TensorRT-RTX are really built, for GPUs that are not there; the engine runs on a stand-in."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import re
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import tensorrt_rtx
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import engines.tensorrt_plan
import export.tensorrt
from engines.base import EngineSpec
from engines.cache.columns import index_columns
from engines.folder import cache_folder, open_engine, read_spec, write_spec
from engines.onnx.engine import OnnxRuntimeEngine
from engines.pytorch.hook import cache_shape
from engines.tensorrt.engine import MAX_CONTEXTS, TensorRTEngine, load_plan
from engines.tensorrt_plan import Gpu, TensorRtPlan, check_plan
from export.checkpoint.weights import model_weights
from export.onnx.graph import write_graph
from export.onnx.widen import write_widened
from export.options import ExportOptions
from export.pair import export_pair
from export.tensorrt import build_plan, plan_for, profile_shapes
from export.verification.verify import TOLERANCE, WIDENED, expect, verify
from mtad.errors import InvalidInput
from mtad.params import DecodingParams
from runtime import LLM, RuntimeConfig
from runtime.decoder.engine_role import EngineRole
from runtime.pair import open_pair
from tests.support import fake_tensorrt
from tests.support.families import FAMILIES, shallow
from tests.support.quick_filters import quick_filters
from tests.support.replayed import ReplayRecorder
from tests.support.steps import make_step, more_tokens, some_tokens
from tests.support.tensorrt import PLAN, SPEC, TARGETS

pytestmark = pytest.mark.usefixtures("traced_once")

Made = tuple[Any, EngineSpec, Path]
"""A model, its specification, and its graph."""
ADA = Gpu("NVIDIA GeForce RTX 4090", "8.9")


def tiny(family: str, dtype: torch.dtype) -> tuple[Any, EngineSpec]:
    """A random model of a family, and its specification."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(shallow(family), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # scores are large enough for a cap to be seen
    sizes: dict[str, Any] = dict(
        zip(("layers", "kv_heads", "head_dim", "vocab_size"), cache_shape(model), strict=True), capacity=256
    )
    return model, replace(SPEC, architecture=family, dtype=str(dtype).split(".")[1], **sizes)


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """A random model of a family, its specification for TensorRT-RTX, and its graph, each made once."""

    @functools.cache
    def make(family: str, attention: str, dtype: torch.dtype) -> Made:
        model, spec = tiny(family, dtype)
        spec, path = replace(spec, format="tensorrt-rtx", attention=attention), tmp_path_factory.mktemp(family)
        write_graph(model, model_weights(model), spec, path / "model.onnx")
        return model, spec, path / "model.onnx"

    return make


GRAPHS = [
    *((family, "operator", torch.float16) for family in FAMILIES if family not in ("opt-350m", "qwen2", "gemma-3")),
    *(("gpt-2", "decomposed", torch.float16), ("qwen2", "operator", torch.bfloat16)),
]
"""Operators of the smallest OPT are OPT's; those of Gemma 3 are Gemma 2's, Mistral's and Qwen 3's."""


def build(graph: Path, spec: EngineSpec, targets: Sequence[str], plan: Path) -> int:
    """Bytes of the plan of a graph."""
    build_plan(graph, replace(spec, plan=plan_for("tensorrt-rtx", spec, targets)), plan)
    return plan.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention", "dtype", "target"),
    [(*graph, target) for graph, target in zip(GRAPHS, itertools.cycle(TARGETS), strict=False)],
    ids=str,
)
def test_every_familys_graph_is_built_for_gpus_that_are_not_here(
    family: str,
    attention: str,
    dtype: torch.dtype,
    target: str,
    graph_of: Callable[..., Made],
    tmp_path: Path,
) -> None:
    """The generations of GPUs take turns; `test_a_plan_grows_with_the_gpus_it_is_for` builds one graph for all."""
    model, spec, graph = graph_of(family, attention, dtype)
    weights = sum(parameter.numel() for parameter in model.parameters()) * 2
    assert build(graph, spec, [target], tmp_path / "model.engine") > weights


@pytest.mark.slow
def test_a_plan_grows_with_the_gpus_it_is_for_up_to_all_that_there_are(
    graph_of: Callable[..., Made], tmp_path: Path
) -> None:
    _, spec, graph = graph_of("llama-3", "operator", torch.float16)
    sizes = [build(graph, spec, targets, tmp_path / "model.engine") for targets in (TARGETS[:1], ())]
    assert sizes == sorted(set(sizes))


def test_timed_kernels_are_kept_for_the_next_build(
    target_graphs: dict[str, Path], own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorRT's part of the build, on the library that is here, which shares its interface
    plan_for("tensorrt-rtx", SPEC, TARGETS)  # Polygraphy is TensorRT-RTX's from now on
    monkeypatch.setattr(export.tensorrt, "_check_polygraphy", lambda _: None)
    plan = replace(PLAN, gpu=ADA.name, compute_capabilities=(ADA.compute_capability,))
    spec = replace(SPEC, format="tensorrt", plan=plan)
    for _ in range(2):
        build_plan(target_graphs["operator"] / "model.onnx", spec, tmp_path / "model.engine")
        (kept,) = (own_cache / "tensorrt").glob("*.timing")
        assert kept.name == "NVIDIA-GeForce-RTX-4090-8.9-1.7.1.116.timing"
    assert (tmp_path / "model.engine").stat().st_size


def test_what_the_parser_refuses_is_one_error_with_its_reason(tmp_path: Path) -> None:
    query, result = (onnx.helper.make_tensor_value_info(name, 10, (1, 2, 4, 16)) for name in ("query", "result"))
    node = onnx.helper.make_node("Attention", ["query"] * 3, ["result"], softcap=2.0)
    graph = onnx.helper.make_graph([node], "capped", [query], [result])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)]), tmp_path / "model.onnx")
    spec = replace(SPEC, precision="float16", format="tensorrt-rtx", plan=PLAN)
    with pytest.raises(InvalidInput, match=r"LlamaForCausalLM cannot be built \(.*softcap.*--attention decomposed"):
        build_plan(tmp_path / "model.onnx", spec, tmp_path / "model.engine")
    assert not (tmp_path / "model.engine").exists()


@pytest.fixture(scope="module")
def rtx_pair(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as plans of both models for one GPU, through the whole export."""
    folder = tmp_path_factory.mktemp("rtx") / "pair"
    assert _export(folder, checkpoints[:1] * 2)
    return folder


def _export(folder: Path, checkpoints: Sequence[Path], **changes: Any) -> bool:
    options: dict[str, Any] = {"format": "tensorrt-rtx", "compute_capabilities": TARGETS[:1], **changes}
    return export_pair(folder, ExportOptions(*map(str, checkpoints), rows=4, capacity=256, **options))


@pytest.mark.slow
def test_an_exported_pair_holds_plans_and_what_they_are_for(rtx_pair: Path, checkpoints: tuple[Path, Path]) -> None:
    for name in ("target", "auxiliary"):
        files = {file.name for file in (rtx_pair / name).iterdir()}
        assert files == {"engine.json", "model.engine", "tokenizer.json", "tokenizer_config.json"}
        plan = read_spec(rtx_pair / name).plan
        assert read_spec(rtx_pair / name).capacity == 256 + 128, "and columns that padded rows write"
        assert plan == TensorRtPlan(tensorrt_rtx.__version__, None, TARGETS[:1], 4, 65, 256)
    assert not _export(rtx_pair, checkpoints[:1] * 2), "up to date"
    with pytest.raises(InvalidInput, match="holds something else"):
        _export(rtx_pair, checkpoints[:1] * 2, compute_capabilities=TARGETS)


@pytest.mark.slow
def test_a_plan_without_its_gpu_is_refused_before_a_runtime_is_made(
    rtx_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_rtx, "Runtime", None)
    with pytest.raises(InvalidInput, match=r"compute capability 8\.6, but torch finds none"):
        open_engine(rtx_pair / "target")


@pytest.mark.parametrize(
    ("plan", "version", "gpu", "problem"),
    [
        (PLAN, "1.6.1.120", ADA, r"built by tensorrt-rtx 1\.7\.1\.116 and runs only with that version"),
        (PLAN, PLAN.version, None, "torch finds none"),
        (PLAN, PLAN.version, Gpu("NVIDIA H200", "9.0"), r"H200 \(9\.0\).*compute capability 8\.6 or 8\.9 or 12\.0"),
        (replace(PLAN, gpu="NVIDIA L4"), PLAN.version, ADA, "built for NVIDIA L4"),
    ],
)
def test_a_plan_is_refused_where_it_does_not_run(
    plan: TensorRtPlan, version: str, gpu: Gpu | None, problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        check_plan("tensorrt-rtx", plan, version, gpu)


def test_a_plan_is_taken_where_it_runs() -> None:
    check_plan("tensorrt-rtx", PLAN, PLAN.version, ADA)
    check_plan("tensorrt", replace(PLAN, gpu=ADA.name), PLAN.version, ADA)


@pytest.mark.slow
def test_a_runtime_that_is_not_there_is_named_with_its_package(rtx_pair: Path, tmp_path: Path) -> None:
    assert importlib.util.find_spec("tensorrt") is None, "this test is for machines without TensorRT"
    shutil.copytree(rtx_pair / "target", tmp_path / "engine")
    write_spec(tmp_path / "engine", replace(read_spec(tmp_path / "engine"), format="tensorrt"))
    with pytest.raises(InvalidInput, match=r"tensorrt cannot be imported.*mtad\[tensorrt\].*JetPack"):
        open_engine(tmp_path / "engine")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [None, [], {}, {**PLAN.__dict__, "gpu": 3}, {**PLAN.__dict__, "decode_rows": 0}, {**PLAN.__dict__, "x": 1}]
)
def test_a_damaged_description_of_a_plan_is_refused(plan: object, rtx_pair: Path, tmp_path: Path) -> None:
    shutil.copytree(rtx_pair / "target", tmp_path / "engine")
    path = tmp_path / "engine" / "engine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "plan": plan}))
    with pytest.raises(InvalidInput, match="plan"):
        read_spec(tmp_path / "engine")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Gpu | None], None]:
    """A machine with a TensorRT of this version, and this GPU."""

    def install(version: str, gpu: Gpu | None) -> None:
        monkeypatch.setattr(export.tensorrt, "load_runtime", lambda _: SimpleNamespace(__version__=version))
        monkeypatch.setattr(export.tensorrt, "_check_polygraphy", lambda _: None)
        monkeypatch.setattr(export.tensorrt, "current_gpu", lambda: gpu)

    return install


@pytest.mark.parametrize(
    ("version", "gpu", "changes", "problem"),
    [
        ("10.13.3.9", ADA, {}, r"older than 10\.15; .*--attention decomposed"),
        ("8.6.1", ADA, {"attention": "decomposed"}, r"older than 10\.3; install a newer one$"),
        ("10.16.2.1", None, {}, "builds on the GPU that will run the plan.*tensorrt-rtx needs no GPU"),
        ("10.16.2.1", Gpu("Tesla T4", "7.5"), {"dtype": "bfloat16"}, "does not support it; give float16"),
        ("11.4.0.106", Gpu("NVIDIA Thor", "11.0"), {}, "no JetPack for NVIDIA Thor has TensorRT 11"),
    ],
)
def test_what_a_devices_tensorrt_cannot_build_is_refused(
    version: str, gpu: Gpu | None, changes: dict[str, Any], problem: str, device: Callable[..., None]
) -> None:
    device(version, gpu)
    with pytest.raises(InvalidInput, match=problem):
        plan_for("tensorrt", replace(SPEC, **changes))


@pytest.mark.parametrize(("version", "attention"), [("10.16.2.10", "operator"), ("10.3.0", "decomposed")])
def test_a_jetsons_tensorrt_builds_for_the_jetson(version: str, attention: str, device: Callable[..., None]) -> None:
    device(version, Gpu("Orin", "8.7"))
    plan = plan_for("tensorrt", replace(SPEC, attention=attention, precision="float16"))
    assert (plan.gpu, plan.compute_capabilities, plan.version) == ("Orin", ("8.7",), version)
    with pytest.raises(InvalidInput, match="builds only for the GPU it runs on"):
        plan_for("tensorrt", replace(SPEC, attention=attention), ["8.7"])


def test_a_missing_polygraphy_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "polygraphy", None)
    with pytest.raises(InvalidInput, match=r"Polygraphy cannot be imported.*mtad\[tensorrt-rtx\]"):
        plan_for("tensorrt-rtx", SPEC, TARGETS)


def test_profiles_span_the_engines_steps_and_the_static_capacity() -> None:
    prefill, decode = profile_shapes(SPEC, PLAN)
    assert set(prefill) == set(decode)
    assert [shape[0] for shape in prefill["tokens"]] == [1, 1, 1]
    assert decode["mask"] == ((1, 1, 1, 64), (2, 1, 9, 256), (4, 1, 9, 512))
    assert decode["past_key.1"] == tuple((rows, 2, 512, 16) for rows in (1, 2, 4))
    for profile in (prefill, decode):
        for least, likeliest, largest in profile.values():
            assert all(a <= b <= c for a, b, c in zip(least, likeliest, largest, strict=True))


# decomposed graphs, on ONNX Runtime


def test_a_decomposed_graph_has_no_newer_operators(target_graphs: dict[str, Path]) -> None:
    graph = onnx.load(target_graphs["decomposed"] / "model.onnx", load_external_data=False)
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 18)]
    newer = {"Attention", "RotaryEmbedding", "RMSNormalization", "TensorScatter"}
    assert not newer & {node.op_type for node in graph.graph.node}


@pytest.mark.slow
def test_capped_scores_are_decomposed_for_tensorrt_alone(graph_of: Callable[..., Made]) -> None:
    model, spec, path = graph_of("gemma-2", "operator", torch.float16)
    kinds = {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    assert "Attention" not in kinds
    assert {"Softmax", "TensorScatter", "RMSNormalization", "RotaryEmbedding"} <= kinds
    write_widened(path, path.with_name("wide.onnx"))
    reference, spec = copy.deepcopy(model).float(), replace(spec, format="onnx", dtype="float32", precision="float32")
    reference.set_attn_implementation("eager")
    engine, allowed = OnnxRuntimeEngine(path.parent, spec, 1, "wide.onnx"), WIDENED["float16"]
    assert verify(engine, expect(reference, spec), allowed=allowed) <= allowed


@pytest.mark.slow
def test_a_decomposed_pair_is_exported_verified_and_says_so(
    write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", seed=5, num_hidden_layers=1)
    options: dict[str, Any] = {"format": "onnx", "compute_capabilities": ()}
    assert _export(tmp_path / "pair", (source, source), attention="decomposed", **options)
    assert read_spec(tmp_path / "pair" / "target").attention == "decomposed"
    assert json.loads((tmp_path / "pair" / "target" / "engine.json").read_text())["attention"] == "decomposed"
    assert not _export(tmp_path / "pair", (source, source), attention="decomposed", **options), "up to date"
    with pytest.raises(InvalidInput, match="holds something else"):
        _export(tmp_path / "pair", (source, source), **options)


# the engine, on a stand-in for the runtime


@pytest.fixture(params=[("tensorrt", "operator"), ("tensorrt-rtx", "operator"), ("tensorrt", "decomposed")])
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
    assert not engine.cache.kv.any()
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
    assert first._config
    first._config.cache.blob = b"kernels of a shape"
    del first
    gc.collect()
    assert (cache_folder() / "tensorrt-rtx" / "kept.kernels").read_bytes() == b"kernels of a shape"
    second = opened(tmp_path, spec)
    assert second._config
    assert second._config.cache.blob == b"kernels of a shape"


def test_contexts_are_bounded_and_graphs_of_those_that_went_are_void(engine: TensorRTEngine) -> None:
    kept = [weakref.ref(context) for context in engine._engine.contexts]
    engine._engine.contexts.clear()  # only the engine keeps them now
    shapes = [(steps, some, length) for steps in range(1, 10) for some in range(1, steps + 1) for length in (64, 128)]
    stand_on = engine.captured_on
    for number, (steps, some, length) in enumerate(shapes[: MAX_CONTEXTS + 1]):
        assert (engine.captured_on is stand_on) == (number <= MAX_CONTEXTS)
        step = make_step(more_tokens(2, steps), [4, 9], keep=[0] * some)
        engine.step(replace(step, mask=torch.nn.functional.pad(step.mask, (0, length - step.mask.shape[3]))))
        kept += map(weakref.ref, engine._engine.contexts)
        engine._engine.contexts.clear()
    assert engine.captured_on is not stand_on
    del stand_on
    assert sum(context() is not None for context in kept) == 2, "that of prompts, and the last shape's"


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
    assert recorder.recorded > device.blocks.recorded > 0


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


def test_a_plan_the_runtime_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.engine").write_bytes(b"nothing")
    spec = replace(SPEC, format="tensorrt-rtx", plan=PLAN)
    with pytest.raises(InvalidInput, match="cannot load it"):
        opened(tmp_path, spec)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_the_real_runtime_says_on_the_log_why_it_takes_no_plan(
    rtx_pair: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidInput, match="cannot load it"):
        load_plan(tensorrt_rtx, rtx_pair / "auxiliary" / "model.engine")
    assert any("CUDA" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")


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


@pytest.mark.parametrize(
    "name",
    ["ExecutionContextAllocationStrategy", "DynamicShapesKernelSpecializationStrategy", "CudaGraphStrategy"],
)
def test_the_stand_ins_choices_are_the_runtimes(name: str) -> None:
    assert set(getattr(fake_tensorrt, name).__members__) <= set(getattr(tensorrt_rtx, name).__members__)


def test_a_gpu_is_named_as_torch_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or engines.tensorrt_plan.current_gpu() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 5090")
    assert engines.tensorrt_plan.current_gpu() == Gpu("NVIDIA GeForce RTX 5090", "12.0")
