"""`mtad export --to tensorrt-llm`: what would be built, as data; and the building, which was never executed.

The plan needs no GPU and not the library. Engines are built by `trtllm-build`, one a role; see docs/tensorrt-llm.md.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast, get_args

import torch
from transformers import OPTForCausalLM

from engines.folder import vocabulary_hash, write_folder, write_json
from engines.placement import versions
from engines.tensorrt_llm_spec import FORMAT, Drafting, ExecutorSpec, Role, paths
from export.checkpoint.checkpoint import find
from export.checkpoint.vocabulary import common_vocabulary
from export.options import ExportOptions
from export.tensorrt_llm.engine_plan import ARCHITECTURES, QUANTIZATIONS, TYPES, EnginePlan, plan_engine, sizes
from export.tensorrt_llm.opt_checkpoint import write_opt_checkpoint
from mtad.errors import InvalidInput
from mtad.params import DecodingParams


@dataclass(frozen=True)
class ExecutorPairPlan:
    """How a pair is made: its engines, and what `pair.json` will say."""

    engines: dict[str, EnginePlan]
    description: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        engines = {role: plan.to_dict() for role, plan in self.engines.items()}
        return {"format": FORMAT, **self.description, "engines": engines}

    def __str__(self) -> str:
        return "\n".join(map(str, self.engines.values()))


def plan_pair(
    asked: ExportOptions,
    *,
    draft_len: int = 8,
    beam_width: int = 4,
    drafting: str = "search",
    tensor_parallel: int = 1,
    quantization: str = "none",
    weights: bool = True,
) -> ExecutorPairPlan:
    """Plan the engines of a pair. Reads the checkpoints' configurations and tokenizers, nothing else; writes nothing.

    Args:
        asked: both checkpoints, rows, capacity, precision, the data set that Model Optimizer calibrates with (a local
            folder or a hub id), and the defaults: the target is built for as many paths per row as they score.
        tensor_parallel: GPUs of each engine.
        draft_len, beam_width, drafting: largest draft, and how the auxiliary finds it (`engines.tensorrt_llm_spec`).
        quantization: of the target's weights: `none`, `fp8`, `int4_awq`. The auxiliary's stay as they are: it is small,
            and a draft is only as good as its likelihoods.
        weights: download the weights of hub ids; without, nothing can be built from the plan.

    Raises:
        InvalidInput: something cannot be built, or would not be what was asked for.
    """
    rows, capacity, precision = asked.rows, asked.capacity or 1024, asked.precision or "float16"
    counts = {"draft_len": draft_len, "beam_width": beam_width, "tensor_parallel": tensor_parallel}
    for name, value in counts.items():
        if value < 1:
            raise InvalidInput(name, value, "give at least 1")
    names = {"precision": (precision, TYPES), "quantize": (quantization, tuple(QUANTIZATIONS))}
    for name, (given, known) in (names | {"drafting": (drafting, get_args(Drafting))}).items():
        if given not in known:
            raise InvalidInput(name, given, f"TensorRT-LLM engines: choose one of {', '.join(known)}")
    if draft_len * beam_width >= capacity:
        raise InvalidInput("draft_len", draft_len, f"draft_len x beam_width must stay below the capacity, {capacity}")
    calibration = None if asked.calibration is None else str(asked.calibration)
    if (quantization == "none") != (calibration is None):
        problem = "quantized weights need a data set to be calibrated with, others none: a local folder or a hub id"
        raise InvalidInput("calibration", calibration, problem)
    checked = DecodingParams.from_dict(dict(asked.defaults))
    largest = (
        ("draft_len", 0 if checked.automatic else checked.drafted, draft_len),
        ("beam_width", checked.draft_width, beam_width),
    )
    for name, needed, most in largest:
        if needed > most:
            problem = f"requests ask for {needed} unless they say otherwise; build for that, or give other --defaults"
            raise InvalidInput(name, most, problem)
    if asked.auxiliary is None:
        raise InvalidInput("auxiliary", None, "TensorRT-LLM's engines are built in pairs; give a checkpoint")
    models = [find("target", asked.target, weights), find("auxiliary", asked.auxiliary, weights)]
    shapes = [model.spec(rows, capacity, "float16", FORMAT) for model in models]
    tokenizers = [model.tokenizer() for model in models]
    size = common_vocabulary(*tokenizers, *(shape.vocab_size for shape in shapes))
    made_with = {"python": platform.python_version(), **versions("mtad", "torch", "transformers")}
    engines = {}
    for role, model, shape in zip(get_args(Role), models, shapes, strict=True):
        is_target = role == "target"
        beams = beam_width if drafting == "search" and not is_target else 1
        requests = paths(checked) if is_target else beam_width // beams
        spec = ExecutorSpec(
            role=role,
            architecture=shape.architecture,
            vocab_size=shape.vocab_size,
            dtype=precision,
            quantization=quantization if is_target else "none",
            tensor_parallel=tensor_parallel,
            rows=rows,
            capacity=capacity,
            draft_len=draft_len,
            beam_width=beam_width,
            drafting=cast(Drafting, drafting),
            max_beam_width=beams,
            max_draft_len=draft_len if is_target else 0,
            **sizes(rows, capacity, requests, beams, draft_len),
            eos_token_ids=shape.eos_token_ids,
            checkpoint_hash=shape.checkpoint_hash,
            versions=made_with,
        )
        engines[role] = plan_engine(spec, model, shape, calibration)
    description = {
        "vocab_size": size,
        "vocabulary_hash": vocabulary_hash(tokenizers[0].get_vocab()),
        "defaults": models[0].defaults(asked.defaults),
    }
    return ExecutorPairPlan(engines, description)


def build_pair(
    plan: ExecutorPairPlan, folder: Path, overwrite: bool = False, run: Callable[..., Any] = subprocess.run
) -> None:
    """Build what is planned into `folder`. Not executed.

    Args:
        plan, folder: of the pair, and its folder; `overwrite` replaces an existing one.

    Raises:
        InvalidInput: the library is missing, the folder is in use, or the library refuses; nothing is left behind.
    """
    if folder.exists() and not (overwrite and (folder / "pair.json").is_file()):
        raise InvalidInput("pair", str(folder), "exists already; give another name, or --overwrite for a pair folder")
    if shutil.which("trtllm-build") is None:
        problem = "trtllm-build is not on PATH; install 'mtad[tensorrt-llm]' (docs/tensorrt-llm.md), or look at --plan"
        raise InvalidInput("to", FORMAT, problem)
    with write_folder(folder.absolute()) as temporary:
        for role, each in plan.engines.items():
            _converted(each, temporary / f"{role}.checkpoint")
            done = run(list(each.build), cwd=temporary, check=False)
            if done.returncode:
                raise InvalidInput(role, str(each.checkpoint.folder), f"trtllm-build failed: {' '.join(each.build)}")
            shutil.rmtree(temporary / f"{role}.checkpoint")
            each.checkpoint.tokenizer().save_pretrained(temporary / role)
            used = dict(each.spec.versions)
            with contextlib.suppress(PackageNotFoundError):
                used["tensorrt-llm"] = version("tensorrt-llm")
            write_json(temporary / role / "engine.json", asdict(replace(each.spec, versions=used)))
        write_json(temporary / "pair.json", plan.description)


def _converted(plan: EnginePlan, folder: Path) -> None:
    spec, arguments, owner = plan.spec, dict(plan.convert["arguments"]), ARCHITECTURES[plan.spec.architecture]
    if owner is None:
        model = plan.checkpoint.load(torch.float32)
        assert isinstance(model, OPTForCausalLM)
        write_opt_checkpoint(model, folder, spec.dtype, spec.tensor_parallel)
        return
    converter, parallel = getattr(import_module("tensorrt_llm.models"), owner), arguments.pop("mapping")
    mapping = import_module("tensorrt_llm").Mapping
    if spec.quantization != "none":
        quantized = arguments.pop("quant_config")
        algorithm = import_module("tensorrt_llm.quantization").QuantAlgo[quantized["quant_algo"]]
        named = quantized | {"quant_algo": algorithm}
        config = import_module("tensorrt_llm.models.modeling_utils").QuantConfig(**named)
        converter.quantize(**arguments, output_dir=str(folder), mapping=mapping(**parallel), quant_config=config)
        return
    for rank in range(spec.tensor_parallel):
        model = converter.from_hugging_face(**arguments, mapping=mapping(**parallel, rank=rank))
        model.save_checkpoint(str(folder), save_config=rank == 0)
        del model  # the next rank's weights take its place
