"""TensorRT: plans of TensorRT-RTX are really built, for GPUs that are not there, and refused where they do not run."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import tensorrt_rtx
import torch
from transformers import AutoModelForCausalLM

import export.tensorrt
from engines.base import EngineSpec
from engines.folder import open_engine, read_spec, write_spec
from engines.onnx.engine import OnnxRuntimeEngine
from engines.pytorch.hook import cache_shape
from engines.tensorrt.engine import _logger, load_plan
from engines.tensorrt_plan import Gpu, TensorRtPlan, check_plan
from export.onnx.graph import write_graph
from export.onnx.widen import write_widened
from export.options import ExportOptions
from export.pair import export_pair
from export.tensorrt import build_plan, plan_for, profile_shapes
from export.verification.verify import ACTIVATIONS, WIDENED, expect, verify
from mtad.errors import InvalidInput
from tests.support.families import FAMILIES, shallow
from tests.support.tensorrt import ADA, PLAN, SPEC, TARGETS

pytestmark = pytest.mark.usefixtures("traced_once")

Made = tuple[Any, EngineSpec, Path]
"""A model, its specification, and its graph."""


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
        write_graph(model, model.state_dict().__getitem__, spec, path / "model.onnx")
        return model, spec, path / "model.onnx"

    return make


COVERED = ("llama-3", "opt-350m", "qwen2", "qwen3", "mistral", "gemma-3", "gpt-2")
"""`rtx_pair` is Llama's; operators of the smallest OPT are OPT's, those of Qwen 2 Llama's and OPT's, and Gemma 3, which
`GRAPHS` has in bfloat16, has the window of Mistral and the norms of queries and keys of Qwen 3."""
GRAPHS = [
    *((family, "operator", torch.float16) for family in FAMILIES if family not in COVERED),
    *(("gpt-2", "decomposed", torch.float16), ("gemma-3", "operator", torch.bfloat16)),
]

TOGETHER_AND_ALONE = [TARGETS, *((target,) for target in TARGETS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention", "dtype", "targets"),
    [(*graph, targets) for graph, targets in zip(GRAPHS, itertools.cycle(TOGETHER_AND_ALONE), strict=False)],
    ids=str,
)
def test_every_familys_graph_is_built_for_gpus_that_are_not_here(
    family: str, attention: str, dtype: torch.dtype, targets: tuple[str, ...], graph_of: Callable[..., Made]
) -> None:
    """A plan names those that it is for."""
    model, spec, graph = graph_of(family, attention, dtype)
    path = graph.with_name("model.engine")
    build_plan(graph, replace(spec, plan=plan_for("tensorrt-rtx", spec, targets)), path)
    plan = path.read_bytes()
    assert len(plan) > 2 * sum(parameter.numel() for parameter in model.parameters())
    assert all(f"sm{target.replace('.', '')}".encode() in plan for target in targets)


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


def test_an_exported_folder_holds_a_plan_and_what_it_is_for(rtx_export: Callable[..., bool], rtx_pair: Path) -> None:
    folder = rtx_pair / "auxiliary"
    files, spec = {file.name for file in folder.iterdir()}, read_spec(folder)
    assert files == {"engine.json", "model.engine", "tokenizer.json", "tokenizer_config.json"}
    assert spec.capacity == 256 + 128, "and columns that padded rows write"
    assert spec.plan == TensorRtPlan(tensorrt_rtx.__version__, None, ("8.9",), 4, 65, 256)
    assert not rtx_export(rtx_pair), "up to date"
    with pytest.raises(InvalidInput, match="holds something else"):
        rtx_export(rtx_pair, compute_capabilities=["8.9", "12.0"])


def test_an_export_makes_plans_each_of_its_own_precision_and_reports_what_was_executed(rtx_pair: Path) -> None:
    assert {path.name for path in rtx_pair.parent.iterdir()} == {"pair", "pair.lock"}
    folder, made = rtx_pair / "target", {"engine.json", "model.engine", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (rtx_pair / "auxiliary").iterdir()} == made
    assert {file.name for file in folder.iterdir()} == made | {"quantization.json"}
    assert read_spec(rtx_pair / "auxiliary").precision == "float16"
    spec, report = read_spec(folder), json.loads((folder / "quantization.json").read_text())
    assert (spec.precision, spec.dtype, report["precision"]) == ("fp8", "float16", "fp8")
    assert spec.plan is not None
    assert spec.plan.compute_capabilities == ("8.9",)
    assert spec.versions["nvidia-modelopt"]
    assert "on a CPU" in report["executed"]
    assert report["bytes"]["engine"] == (folder / "model.engine").stat().st_size
    assert report["verification"]["computed_in_float32"] <= WIDENED["float16"]
    assert 0 < report["verification"]["activations"] <= ACTIVATIONS["fp8"]
    assert report["text"]["perplexity"]["engine"] != report["text"]["perplexity"]["float32"]


def test_a_plan_without_its_gpu_is_refused_before_a_runtime_is_made(
    rtx_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_rtx, "Runtime", None)
    with pytest.raises(InvalidInput, match=r"compute capability 8\.9, but torch finds none"):
        open_engine(rtx_pair / "auxiliary")


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


def test_a_runtime_that_is_not_there_is_named_with_its_package(rtx_pair: Path, tmp_path: Path) -> None:
    assert importlib.util.find_spec("tensorrt") is None, "this test is for machines without TensorRT"
    shutil.copytree(rtx_pair / "auxiliary", tmp_path / "engine")
    write_spec(tmp_path / "engine", replace(read_spec(tmp_path / "engine"), format="tensorrt"))
    with pytest.raises(InvalidInput, match=r"tensorrt cannot be imported.*the extra tensorrt installs it.*JetPack"):
        open_engine(tmp_path / "engine")


@pytest.mark.parametrize(
    "plan", [None, [], {}, {**PLAN.__dict__, "gpu": 3}, {**PLAN.__dict__, "decode_rows": 0}, {**PLAN.__dict__, "x": 1}]
)
def test_a_damaged_description_of_a_plan_is_refused(plan: object, rtx_pair: Path, tmp_path: Path) -> None:
    shutil.copytree(rtx_pair / "auxiliary", tmp_path / "engine")
    path = tmp_path / "engine" / "engine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "plan": plan}))
    with pytest.raises(InvalidInput, match=r"plan|decode_rows"):
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


def test_a_missing_polygraphy_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "polygraphy.config", None)
    with pytest.raises(InvalidInput, match=r"polygraphy.config cannot be imported.*the extra tensorrt-rtx"):
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
    decomposed = ExportOptions(str(source), rows=4, capacity=256, format="onnx", attention="decomposed")
    assert export_pair(tmp_path / "pair", decomposed)
    assert read_spec(tmp_path / "pair" / "target").attention == "decomposed"
    assert not export_pair(tmp_path / "pair", decomposed), "up to date"
    with pytest.raises(InvalidInput, match="holds something else"):
        export_pair(tmp_path / "pair", replace(decomposed, attention="operator"))


# the engine, on a stand-in for the runtime


def test_the_real_runtime_says_on_the_log_why_it_takes_no_plan(
    rtx_pair: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidInput, match="cannot load it"):
        load_plan(tensorrt_rtx, rtx_pair / "auxiliary" / "model.engine")
    assert _logger(tensorrt_rtx) is _logger(tensorrt_rtx), "TensorRT keeps the first one, also when its engine is gone"
    assert any("CUDA" in record.getMessage() for record in caplog.records if record.levelname == "ERROR")
