"""OpenVINO decodes as ONNX Runtime does, over pages that rows and kept prefixes share."""

from __future__ import annotations

import math
import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import onnx
import pytest
import torch
from transformers import LlamaForCausalLM

from engines.base import Step
from engines.folder import open_engine, read_spec
from engines.openvino import engine as openvino_engine
from engines.openvino import graph as openvino_graph
from engines.openvino.engine import OpenVinoEngine
from engines.openvino.graph import computes_bfloat16
from engines.placement import ONE_CORE, Placement, cores
from export.onnx.folding import TRANSPOSED
from export.quantization.weight_only import block_size, quantize_graph
from export.verification.verify import expect, verify_activations
from mtad import LLM, DecodingParams, RuntimeConfig
from mtad.errors import InvalidInput
from runtime import pair
from runtime.pair import Pair
from runtime.tuning.measure import answer
from tests.support.chi_square import p_value
from tests.support.integrity import check_caches, check_loop
from tests.support.schedules import run_schedule
from tests.support.steps import make_step, some_tokens

FLOAT32 = RuntimeConfig(threads=1, provider="openvino", compute="float32")
LOSSLESS = ("block", "traversal")
METHODS = ("sample", "speculative", "block", "traversal", "mtad", "mmtad", "relaxed", "mmtad_sample")


@pytest.fixture(scope="module", autouse=True)
def auxiliary_on_openvino() -> Iterator[None]:
    """Where it runs is otherwise a race, which ONNX Runtime wins with models as small as these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "fastest_placement", lambda folder, spec, placement: placement)
        yield


@pytest.fixture(scope="module")
def folder(pair_folders: Callable[[str], Path]) -> Path:
    return pair_folders("onnx")


@pytest.fixture(scope="module")
def opened(folder: Path) -> Pair:
    return pair.open_pair(folder, FLOAT32)


@pytest.fixture
def llm(opened: Pair) -> LLM:
    return LLM(opened, RuntimeConfig())


def test_an_engine_that_nobody_holds_takes_no_memory(folder: Path) -> None:
    """Providers are timed one after the other, so that never two engines are there."""
    engine = open_engine(folder / "target", Placement(provider="openvino"))
    gone = weakref.ref(engine)
    del engine
    assert gone() is None


@pytest.mark.parametrize("threads", sorted({1, 2, cores()}))
def test_the_default_type_is_near_the_checkpoint_and_threads_are_bound_to_cores_where_they_have_all_of_them(
    folder: Path, reference: LlamaForCausalLM, threads: int
) -> None:
    """The type is bfloat16 where the CPU has it; bound to some cores, every process would have the first ones.

    Several threads run OpenVINO's own MLP, for which the graph has to have its weights as it expects them.
    """
    engine = open_engine(folder / "target", Placement(provider="openvino", threads=threads))
    assert engine.name.endswith("bfloat16" if computes_bfloat16() else "float32")
    assert verify_activations(engine, expect(reference, engine.spec), precision="int8") < 0.05
    assert isinstance(engine, OpenVinoEngine)
    compiled = engine._request.get_compiled_model()
    operators = compiled.get_runtime_model().get_ops()
    fused = sum(operator.get_rt_info()["layerType"].astype(str) == "LLMMLP" for operator in operators)
    amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    assert fused == (engine.spec.layers if amx and threads > 1 else 0)
    assert compiled.get_property("ENABLE_CPU_PINNING") == (threads >= (os.cpu_count() or 1))


@pytest.mark.parametrize(("precision", "kind"), [("int8", "u8"), ("int4", "u4")])
def test_weights_stay_quantized_with_one_zero_point_and_activations_share_scales_as_they_do(
    folder: Path, tmp_path: Path, precision: str, kind: str
) -> None:
    """Of any other form OpenVINO makes float32, in which it computes on every CPU, or is slow over a few tokens."""
    source, spec = folder / "target", read_spec(folder / "target")
    names = {one.name.removesuffix(TRANSPOSED) for one in onnx.load(source / "model.onnx").graph.initializer}
    quantize_graph(source / "model.onnx", tmp_path / "model.onnx", precision, names, {})
    engine = OpenVinoEngine(tmp_path, replace(spec, precision=precision), ONE_CORE)
    compiled = engine._request.get_compiled_model()
    nodes = compiled.get_runtime_model().get_ops()
    products = [one for one in nodes if one.get_rt_info()["layerType"].astype(str) == "FullyConnected"]
    assert len(products) == 7 * spec.layers + 1
    for product in products:
        _, weights, _, _, zeros = product.input_values()
        assert [one.get_element_type().get_type_name() for one in (weights, zeros)] == [kind, kind]
        assert zeros.get_shape() == [1]
    assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == block_size(1024)


@pytest.mark.slow
def test_every_method_decodes_the_same_tokens_as_on_onnx_runtime(llm: LLM, folder: Path) -> None:
    prompts = ["SELECT name FROM", "def largest(values):", "where do they live? " * 6]
    base = DecodingParams(max_tokens=20, ignore_eos=True, accept_threshold=0.3)
    params = [replace(base, method=method, seed=seed) for seed, method in enumerate(METHODS)]
    ours, theirs = (
        one.generate([prompt for prompt in prompts for _ in params], params * len(prompts))
        for one in (llm, LLM(folder, RuntimeConfig(threads=1)))
    )
    assert [result.token_ids for result in ours] == [result.token_ids for result in theirs]
    assert sum(result.statistics.accepted for result in ours) > 20
    check_caches(llm.loop.caches)


def test_a_second_loop_on_the_pair_keeps_prefixes_in_place_of_the_first_ones(llm: LLM) -> None:
    params, prompt = DecodingParams(max_tokens=8, ignore_eos=True, seed=4), "kept by the first loop " * 6
    expected = llm.generate(prompt, params)[0]
    second = LLM(llm.pair, RuntimeConfig())
    second.generate("something else " * 8, params)
    assert llm.generate(prompt, params)[0].token_ids == expected.token_ids
    check_loop(second.loop)
    check_loop(llm.loop)


def test_prompts_of_one_step_are_computed_in_one_run_and_kept_behind_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.pair.target
    assert isinstance(engine, OpenVinoEngine)
    infer = Mock(wraps=engine._infer)
    monkeypatch.setattr(engine, "_infer", infer)
    params = DecodingParams(method="sample", max_tokens=3, ignore_eos=True, seed=1)
    prompts = ["one prompt " * 9, "and another " * 8]
    first = llm.generate(prompts, params)
    assert [len(run.args[0].rows) for run in infer.call_args_list] == [2, 2, 2]
    again = llm.generate(prompts, params)
    assert [result.token_ids for result in again] == [result.token_ids for result in first]
    assert all(result.statistics.reused_tokens >= 64 for result in again)
    check_caches(llm.loop.caches)


def test_a_run_that_fails_leaves_prompts_to_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(folder / "target", Placement(provider="openvino", compute="float32"))
    assert isinstance(engine, OpenVinoEngine)
    prompt = make_step(some_tokens(1, 40)[None], [0], keep=[])
    step = make_step(some_tokens(2, 3)[None], [40])
    engine.step(prompt)
    expected = engine.step(step)
    engine.step(prompt)
    with monkeypatch.context() as broken:
        broken.setattr(engine, "_request", None)
        with pytest.raises(AttributeError):
            engine.step(step)
    torch.testing.assert_close(engine.step(step), expected)


def test_decoding_is_timed_without_the_prompts(opened: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that answer have the tokens of a block and nothing else; without being told, prompts ride along."""
    llm, engine = LLM(opened, RuntimeConfig(prefix_tokens=0)), opened.target
    assert isinstance(engine, OpenVinoEngine)
    infer = Mock(wraps=engine._infer)
    monkeypatch.setattr(engine, "_infer", infer)

    def most() -> int:
        """Tokens of the longest step that answers."""
        runs = [call.args[0] for call in infer.call_args_list]
        return max(int(run.feeds["tokens"].shape[1]) for run in runs if len(run.feeds["keep"]))

    prompts, params = ["a name " * 12, "SELECT " * 12], DecodingParams(method="sample", max_tokens=4, seed=1)
    assert answer(llm, [request for prompt in prompts for request in llm.requests(prompt, params)])[1] > 0
    assert most() == 2
    llm.generate(prompts, params)
    assert most() > 12


@pytest.mark.slow
def test_what_blocks_take_is_learnt_from_blocks_without_prompts(opened: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, told = LLM(opened, RuntimeConfig(prefix_tokens=0)), list[bool]()
    params = DecodingParams(method="mtad", max_tokens=30, ignore_eos=True, seed=1)
    first, second = (llm.add("a name " * 12, replace(params, seed=seed)) for seed in range(2))
    llm.step()
    monkeypatch.setattr(llm.loop.planner, "observe", lambda *arguments: told.append(arguments[6]))
    for _ in range(3):
        llm.step()
    llm.cancel(second)
    rest = llm.add("SELECT " * 12, params)
    while first.finish_reason is None:
        llm.step()
    llm.cancel(rest)
    assert told == [True] * 3 + [False] + [True] * (len(told) - 4)


@pytest.mark.slow
def test_a_pool_smaller_than_the_rows_is_within_the_memory_limit_and_ends_every_text(folder: Path) -> None:
    config = replace(FLOAT32, prefix_tokens=0)
    whole = LLM(folder, config).memory
    limit = replace(whole, pages=whole.capacity // whole.page_columns + 2).total
    small = LLM(folder, replace(config, memory=limit))
    assert small.memory.total <= limit < whole.total
    fewer = LLM(folder, replace(config, memory=limit, rows=2)).memory
    assert fewer.rows == 2 < small.memory.rows
    assert small.memory.pages < fewer.pages
    prompts = [f"{number} singers " * 6 for number in range(8)]
    params = DecodingParams(method="mmtad", max_tokens=40, ignore_eos=True, seed=1)
    results = small.generate(prompts, params)
    assert [len(result.token_ids) for result in results] == [40] * 8
    assert small.loop.totals.preemptions > 0
    check_loop(small.loop)
    for engine in _paged(small):
        assert engine.cache.pages < whole.pages
        assert not engine.cache.columns.table.owned.any(), "a row that nobody has holds pages"


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "runtime"), [(0, "openvino"), (1, "openvino"), (2, "cpu")])
def test_random_schedules_on_few_pages_lose_no_request_and_no_page(
    folder: Path, seed: int, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if runtime == "cpu":
        monkeypatch.setattr(pair, "fastest_placement", lambda *_: Placement(provider="cpu"))
    config = replace(FLOAT32, prefix_tokens=0)
    whole = LLM(folder, config).memory
    llm = LLM(folder, replace(config, memory=replace(whole, pages=whole.capacity // whole.page_columns).total))
    step, faults, ended = llm.pair.target.step, list[Exception | None](), Counter[str]()
    monkeypatch.setattr(llm.pair.target, "step", lambda given: _faulty(faults, step, given))
    chance, base = random.Random(seed), DecodingParams(ignore_eos=True, accept_threshold=0.3)
    prompts = [llm.tokenize(words * chance.randint(1, 12)) for words in ("a name ", "SELECT ", "x") for _ in range(4)]
    entries = [
        (prompt, replace(base, method=chance.choice(METHODS), max_tokens=chance.randint(1, 40), seed=number), None, "")
        for number, prompt in enumerate(prompts)
    ]
    for number in range(4):
        loop = LLM(llm.pair, RuntimeConfig(prefix_tokens=0)).loop
        ended += run_schedule(
            4 * seed + number, loop, entries, lambda chance: faults.extend([None] * chance.randint(0, 5) + [OSError()])
        )
        ended["preempted"] += loop.totals.preemptions
        assert not any(e.cache.columns.table.owned.any() for e in _paged(llm)), "a row that nobody has holds pages"
    assert ended["length"] > 5


def _faulty(faults: list[Exception | None], step: Callable[[Step], torch.Tensor], given: Step) -> torch.Tensor:
    if faults and (fault := faults.pop(0)):
        raise fault
    return step(given)


def _paged(llm: LLM) -> list[OpenVinoEngine]:
    return [one for one in (llm.pair.target, llm.pair.auxiliary) if isinstance(one, OpenVinoEngine)]


@pytest.mark.slow
@pytest.mark.parametrize("method", LOSSLESS)
def test_lossless_methods_keep_the_distribution_of_the_target_in_the_fewest_bits(folder: Path, method: str) -> None:
    """Computed as this CPU does by default, in bfloat16 where it can."""
    llm = LLM(folder, RuntimeConfig(threads=1, provider="openvino", kv_cache="u8"))
    base, prompt = DecodingParams(top_k=3, top_p=1.0, seed=1, ignore_eos=True), llm.tokenize("SELECT name")

    def next_tokens(tokens: list[int]) -> dict[int, float]:
        (result,) = llm.generate(tokens, replace(base, method="sample", max_tokens=1, top_logprobs=3))
        likely = {token: math.exp(value) for token, value in result.top_logprobs[0]}
        return {token: value / sum(likely.values()) for token, value in likely.items()}

    law = {
        (first, second): p * q
        for first, p in next_tokens(prompt).items()
        for second, q in next_tokens([*prompt, first]).items()
    }
    params = replace(base, method=method, draft_len=2, max_tokens=2, n=900)
    assert p_value((tuple(result.token_ids) for result in llm.generate(prompt, params)), law) > 1e-3


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (RuntimeConfig(compute="bfloat16"), "compute"),
        (RuntimeConfig(provider="openvino", compute="float8"), "compute"),
        (RuntimeConfig(provider="openvino", compute="float32", kv_cache="bfloat16"), "kv_cache"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(folder: Path, config: RuntimeConfig, field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}[ :]"):
        LLM(folder, config)


@pytest.mark.skipif(not computes_bfloat16(), reason="no bfloat16 on this CPU")
@pytest.mark.parametrize(("threads_of_a_core", "fuses"), [("1\n", False), ("0\n", True)])
def test_an_mlp_is_fused_only_where_openvino_has_two_threads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads_of_a_core: str, fuses: bool
) -> None:
    """With one, which it takes of a core that runs two, it would divide by zero."""
    (tmp_path / "active").write_text(threads_of_a_core)
    fuse = Mock()
    monkeypatch.setattr(openvino_engine, "SMT", tmp_path / "active")
    monkeypatch.setattr(openvino_engine, "cores", lambda: 2)
    monkeypatch.setattr(openvino_engine, "transpose_weights", fuse)
    open_engine(folder / "target", Placement(provider="openvino", threads=2, compute="bfloat16"))
    assert fuse.called is fuses


@pytest.mark.parametrize("capabilities", [["FP32"], ["FP32", "BF16"]])
def test_bfloat16_is_refused_by_name_where_the_cpu_has_none_or_not_with_avx512(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capabilities: list[str]
) -> None:
    """OpenVINO itself would compute in float32, or fail with an error of its own."""
    core = Mock()
    core.return_value.get_property.return_value = capabilities
    monkeypatch.setattr(openvino_graph, "load_openvino", lambda: SimpleNamespace(Core=core))
    with pytest.raises(InvalidInput, match="compute = 'bfloat16': this CPU has no instructions for it"):
        open_engine(folder / "target", Placement(provider="openvino", compute="bfloat16"))
    monkeypatch.undo()
    monkeypatch.setattr(openvino_engine, "computes_bfloat16", lambda: False)
    assert "float32" in open_engine(folder / "target", Placement(provider="openvino")).name


def test_a_missing_library_is_named_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(InvalidInput, match="the extra openvino"):
        LLM(folder, FLOAT32)
