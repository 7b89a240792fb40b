"""TensorRT-LLM engines: what would be built is checked without the library; the building, with a fake of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import OPTConfig, OPTForCausalLM

from engines.folder import read_spec
from engines.tensorrt_llm_spec import FORMAT
from export.options import ExportOptions
from export.tensorrt_llm import engine_plan as executor_plan
from export.tensorrt_llm.build import ExecutorPairPlan, build_pair, plan_pair
from export.tensorrt_llm.opt_checkpoint import opt_config, write_opt_checkpoint
from mtad.errors import InvalidInput
from tests.support.commands import Run
from tests.support.fake_trtllm_build import OPTIONS, FakeLlama, fake_build, install, opt_logits


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture
def plan(checkpoints: tuple[Path, Path]) -> Callable[..., ExecutorPairPlan]:
    """`plan_pair` of the small pair."""

    def run(**changes: Any) -> ExecutorPairPlan:
        target, auxiliary = map(str, checkpoints)
        asked = {"rows": 4, "capacity": 256, "defaults": {"draft_len": 1, "beam_width": 1}, "format": FORMAT}
        own = {"rows", "capacity", "precision", "calibration", "defaults"} & changes.keys()
        options = ExportOptions(target, auxiliary, **{**asked, **{name: changes.pop(name) for name in own}})  # type: ignore[arg-type]
        return plan_pair(options, **{"draft_len": 4, **changes})

    return run


@pytest.fixture(scope="module")
def opt_checkpoint(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A random OPT checkpoint with the pair's tokenizer."""
    from tests.support.checkpoints import make_tokenizer

    def make(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("opt")
        tokenizer = make_tokenizer()
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"max_position_embeddings": 256, "word_embed_proj_dim": 32, "eos_token_id": 0, "bos_token_id": 0}
        model = OPTForCausalLM(OPTConfig(vocab_size=len(tokenizer), **{**sizes, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def of(plan: ExecutorPairPlan, role: str) -> dict[str, str]:
    """A role's arguments of `trtllm-build`."""
    arguments = plan.engines[role].build
    return {name.removeprefix("--"): value for name, value in zip(arguments[1::2], arguments[2::2], strict=True)}


def test_a_target_takes_drafts_and_an_auxiliary_beams(plan: Callable[..., ExecutorPairPlan]) -> None:
    made = plan(beam_width=3)
    target, auxiliary = of(made, "target"), of(made, "auxiliary")
    assert target["speculative_decoding_mode"] == "draft_tokens_external"
    assert (target["max_draft_len"], target["max_beam_width"], target["max_batch_size"]) == ("4", "1", "4")
    assert (target["max_input_len"], target["max_seq_len"]) == ("256", "261")
    assert "speculative_decoding_mode" not in auxiliary
    assert "max_draft_len" not in auxiliary
    assert (auxiliary["max_beam_width"], auxiliary["max_batch_size"]) == ("3", "4")
    for arguments in (target, auxiliary):
        assert arguments.keys() <= OPTIONS
        assert (arguments["use_paged_context_fmha"], arguments["kv_cache_type"]) == ("enable", "paged")
        assert arguments["logits_dtype"] == "float32"
    steps = of(plan(beam_width=3, drafting="steps"), "auxiliary")
    assert (steps["max_beam_width"], steps["max_batch_size"]) == ("1", "12")


@pytest.mark.parametrize(("method", "paths"), [("mtad", 1), ("mmtad", 3), ("sample", 1)])
def test_sizes_are_rows_times_capacity_times_the_paths_of_the_pairs_method(
    plan: Callable[..., ExecutorPairPlan], method: str, paths: int
) -> None:
    made = plan(rows=5, beam_width=3, defaults={"method": method, "draft_len": 4, "beam_width": 3})
    for role, requests, beams in (("target", paths, 1), ("auxiliary", 1, 3)):
        spec = made.engines[role].spec
        assert int(of(made, role)["max_num_tokens"]) == spec.max_num_tokens == 5 * 256 * requests
        assert spec.kv_tokens == 5 * requests * (256 + beams * 2 * 32)
        assert spec.max_batch_size == 5 * requests


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rows": 0}, "rows"),
        ({"capacity": 100}, "capacity"),
        ({"capacity": 1024}, "capacity"),
        ({"draft_len": 64, "beam_width": 4}, "draft_len"),
        ({"draft_len": 0}, "draft_len"),
        ({"beam_width": 0}, "beam_width"),
        ({"precision": "float32"}, "precision"),
        ({"drafting": "tree"}, "drafting"),
        ({"quantization": "int8"}, "quantize"),
        ({"quantization": "fp8"}, "calibration"),
        ({"calibration": "texts"}, "calibration"),
        ({"quantization": "int4_awq", "calibration": "texts"}, "quantize"),
        ({"tensor_parallel": 3}, "tensor_parallel"),
        ({"tensor_parallel": 8}, "tensor_parallel"),
        ({"rows": 10**6}, "capacity"),
        ({"defaults": {"method": "none"}}, "method"),
        ({"defaults": {"draft_len": 4}, "draft_len": 3}, "draft_len"),
        ({"defaults": {"method": "mtad"}, "beam_width": 3}, "beam_width"),
    ],
)
def test_what_the_library_would_refuse_or_silently_change_is_refused(
    plan: Callable[..., ExecutorPairPlan], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(**changes)
    assert caught.value.field == field


def test_other_architectures_and_quantized_opt_are_refused(
    checkpoints: tuple[Path, Path], opt_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(opt_checkpoint())
    asked = ExportOptions(folder, folder, capacity=128, calibration=Path("texts"), format=FORMAT)
    with pytest.raises(InvalidInput, match="no quantized checkpoint"):
        plan_pair(asked, quantization="fp8")
    monkeypatch.setattr(executor_plan, "ARCHITECTURES", {"OPTForCausalLM": None})
    asked = ExportOptions(*map(str, checkpoints), capacity=128, format=FORMAT)
    with pytest.raises(InvalidInput, match="use --to onnx"):
        plan_pair(asked)


def test_memory_counts_weights_as_they_are_stored_and_shrinks_with_gpus(
    plan: Callable[..., ExecutorPairPlan], checkpoints: tuple[Path, Path]
) -> None:
    stored = sum(value.numel() for value in load_file(checkpoints[0] / "model.safetensors").values())
    one, two = (plan(tensor_parallel=count).engines["target"].to_dict()["memory"] for count in (1, 2))
    assert one["weights"] == 2 * stored
    assert one["weights"] / 2 < two["weights"] < one["weights"]
    assert two["cache"] == one["cache"] / 2
    # 2 layers, keys and values, 2 heads of 16, 2 bytes; of each row the text, and two blocks for its draft
    assert one["cache"] == 2 * 2 * 2 * 16 * 2 * 4 * (256 + 2 * 32)
    assert one["total"] == sum(one.values()) / 2


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_built_pair_holds_engines_descriptions_and_tokenizers_alone(
    plan: Callable[..., ExecutorPairPlan], tmp_path: Path, parallel: int
) -> None:
    folder = tmp_path / "pair"
    made = plan(tensor_parallel=parallel, defaults={"draft_len": 3})
    build_pair(made, folder, run=fake_build)
    assert {path.name for path in folder.iterdir()} == {"target", "auxiliary", "pair.json"}
    assert json.loads((folder / "pair.json").read_text())["defaults"] == {"draft_len": 3}
    for each in made.engines.values():
        described = json.loads((folder / each.spec.role / "engine.json").read_text())
        assert described == json.loads(json.dumps({"version": 1, **asdict(each.spec)}))
        assert (folder / each.spec.role / "tokenizer.json").is_file()
    assert [call["mapping"].rank for call in FakeLlama.calls] == [*range(parallel)] * 2
    assert all(call["load_model_on_cpu"] for call in FakeLlama.calls)
    with pytest.raises(InvalidInput, match="exists already"):
        build_pair(made, folder, run=fake_build)
    build_pair(made, folder, overwrite=True, run=fake_build)


@pytest.mark.usefixtures("library")
def test_weights_are_quantized_by_the_librarys_own_path(write_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", 1, hidden_size=128, intermediate_size=256)
    asked = ExportOptions(
        str(target), str(target), capacity=128, calibration=Path("texts"), precision="bfloat16", format=FORMAT
    )
    made = plan_pair(asked, quantization="int4_awq")
    build_pair(made, tmp_path / "pair", run=fake_build)
    quantized, plain = FakeLlama.calls
    assert vars(quantized["quant"]) == {"quant_algo": "W4A16_AWQ", "group_size": 128}
    assert quantized["data"] == "texts"
    assert quantized["dtype"] == plain["dtype"] == "bfloat16"
    weights = {role: each.memory["weights"] for role, each in made.engines.items()}
    assert weights["target"] < weights["auxiliary"] / 2 + 2 * 2 * 300 * 128


@pytest.mark.usefixtures("library")
def test_a_failing_build_leaves_nothing(plan: Callable[..., ExecutorPairPlan], tmp_path: Path) -> None:
    def broken(*arguments: Any, **others: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=1)

    with pytest.raises(InvalidInput, match="trtllm-build failed"):
        build_pair(plan(), tmp_path / "pair", run=broken)
    assert not list(tmp_path.iterdir())


def test_without_the_library_nothing_is_built_and_the_plan_is_named(
    plan: Callable[..., ExecutorPairPlan], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="--plan"):
        build_pair(plan(), tmp_path / "pair", run=subprocess.run)
    assert not list(tmp_path.iterdir())


def test_the_command_prints_the_plan_as_one_json_and_writes_nothing(
    checkpoints: tuple[Path, Path], tmp_path: Path, run: Run
) -> None:
    pair = ("--target", str(checkpoints[0]), "--auxiliary", str(checkpoints[1]), "--capacity", "256")
    folder = tmp_path / "pair"
    arguments = (str(folder), *pair, "--to", "tensorrt-llm", "--precision", "bfloat16", "--draft-len", "5", "--plan")
    outcome = run("export", *arguments)
    engines = json.loads(outcome.out)["engines"]
    assert engines["target"]["engine"]["max_draft_len"] == 5
    assert (outcome.code, "trtllm-build" in outcome.err) == (0, True)
    assert run("export", *arguments[:-1], "--dry-run")[:2] == (0, "")
    for extra in (["--to", "tensorrt-llm"], ["--draft-len", "5"], ["--plan"]):
        assert run("export", folder, *pair, *extra).code == 2
    assert not folder.exists()


def test_the_onnx_runtime_engine_says_what_an_executors_folder_is(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({"version": 1, "format": "tensorrt-llm"}))
    with pytest.raises(InvalidInput, match="builds and does not run"):
        read_spec(tmp_path)


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("changes", [{}, {"do_layer_norm_before": False}, {"word_embed_proj_dim": 16}])
def test_an_opt_checkpoint_computes_what_its_source_computes(
    opt_checkpoint: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], parallel: int
) -> None:
    model = OPTForCausalLM.from_pretrained(opt_checkpoint(**changes)).eval()
    folder = tmp_path / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:  # rounding to 16 bits would hide a wrong split
        patch.setattr(torch, "float16", torch.float32)
        write_opt_checkpoint(model, folder, "float16", parallel)
    tokens = torch.tensor([5, 17, 0, 255, 31, 2])
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0].double()
    assert (opt_logits(folder, tokens) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert opt_config(model, "float16", parallel)["mapping"] == {
        "world_size": parallel,
        "tp_size": parallel,
        "pp_size": 1,
    }
