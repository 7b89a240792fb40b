"""`mtad-export --to tensorrt-llm`: what would be built, as data; and the building. The building was never executed.

The plan needs no GPU and not the library: it is checked against limits that the library would silently lift, clip or
truncate to. Engines are built by `trtllm-build`, one a role; see docs/tensorrt-llm.md.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, OPTForCausalLM

from engines.base import BLOCK, EngineSpec
from engines.executor_spec import FORMAT, ExecutorSpec, write_executor_spec
from engines.folder import vocabulary_hash, write_folder, write_json
from export.checkpoint import Checkpoint, find
from export.opt_checkpoint import write_opt_checkpoint
from export.vocabulary import common_vocabulary
from mtad.errors import InvalidInput
from mtad.params import DecodingParams

ARCHITECTURES = {"LlamaForCausalLM": "LLaMAForCausalLM", "OPTForCausalLM": None}
"""Architectures, and the library's class that converts their checkpoints; None where this package does (`export.
opt_checkpoint`)."""
TYPES = ("float16", "bfloat16")
QUANTIZATIONS = {"none": None, "fp8": "FP8", "int4_awq": "W4A16_AWQ"}
"""Of the weights, and the library's name for them (`QuantAlgo`)."""
GROUP = 128
"""Weights that share a scale, int4_awq."""
TOKENS_PER_BLOCK = 32
"""Tokens of a block of keys and values: what is reused at a time."""
LEAST_TOKENS = 2048
"""Tokens of an iteration at least, where a text is not shorter."""


@dataclass(frozen=True)
class Memory:
    """What one engine takes on each GPU, in bytes; its activations are the library's own and not counted.

    Attributes:
        weights: as stored in the engine.
        tokens: tokens of all rows' texts, with the blocks that drafts begin.
        cache: their keys and values: what the executor's share of the memory must hold at least.
        logits: of one iteration, float32, all rows' drafts.
    """

    weights: int
    tokens: int
    cache: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.logits


@dataclass(frozen=True)
class EnginePlan:
    """How one engine is made.

    Attributes:
        spec: what its `engine.json` will say.
        checkpoint: what it is made of.
        convert: the step from the Hugging Face checkpoint to the library's: who does it, with which arguments.
        build: arguments of `trtllm-build`; folders relative to the pair's.
        memory: on each GPU.
    """

    spec: ExecutorSpec
    checkpoint: Checkpoint
    convert: dict[str, Any]
    build: tuple[str, ...]
    memory: Memory


@dataclass(frozen=True)
class Plan:
    """How a pair is made.

    Attributes:
        target, auxiliary: its engines.
        description: of `pair.json`.
    """

    target: EnginePlan
    auxiliary: EnginePlan
    description: dict[str, Any]

    @property
    def engines(self) -> tuple[EnginePlan, EnginePlan]:
        """Both."""
        return self.target, self.auxiliary

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "format": FORMAT,
            **self.description,
            "engines": {
                plan.spec.role: {
                    "source": str(plan.checkpoint.folder),
                    "engine": asdict(plan.spec),
                    "convert": plan.convert,
                    "build": list(plan.build),
                    "memory": {**asdict(plan.memory), "total": plan.memory.total},
                }
                for plan in self.engines
            },
        }

    def __str__(self) -> str:
        lines = []
        for plan in self.engines:
            spec, memory = plan.spec, plan.memory
            lines += [
                f"{spec.role}: {spec.architecture}, {spec.dtype}, weights {spec.quantization}, "
                f"{spec.tensor_parallel} GPU{'s' * (spec.tensor_parallel > 1)}",
                f"  {spec.rows} rows of {spec.capacity} tokens, {spec.max_batch_size} requests at once, "
                f"{spec.max_num_tokens} tokens an iteration, drafts of {spec.draft_len} x {spec.beam_width} beams",
                f"  memory a GPU: weights {_bytes(memory.weights)} + keys and values of {memory.tokens} tokens "
                f"{_bytes(memory.cache)} + logits {_bytes(memory.logits)} = {_bytes(memory.total)}",
                f"  convert: {plan.convert['by']} {json.dumps(plan.convert['arguments'])}",
                f"  build:   {' '.join(plan.build)}",
            ]
        return "\n".join(lines)


def plan_pair(
    target: str,
    auxiliary: str,
    *,
    rows: int = 8,
    capacity: int = 1024,
    dtype: str = "float16",
    draft_len: int = 8,
    beam_width: int = 4,
    drafting: str = "search",
    tensor_parallel: int = 1,
    quantization: str = "none",
    calibration: str | None = None,
    max_num_tokens: int | None = None,
    defaults: dict[str, object] | None = None,
) -> Plan:
    """Plan the engines of a pair. Reads the checkpoints' configurations and tokenizers, nothing else; writes nothing.

    Args:
        target, auxiliary: local checkpoint folders or hub ids.
        rows: texts decoded at once.
        capacity: tokens of a text at most, prompt and new ones and one draft, a multiple of 64.
        dtype: `float16` or `bfloat16`.
        draft_len, beam_width: largest draft.
        drafting: how the auxiliary is to be used (`runtime.tensorrt_llm.courses.Drafting`): one request a draft with
            beams, or as many requests as beams.
        tensor_parallel: GPUs of each engine.
        quantization: of the target's weights: `none`, `fp8`, `int4_awq`. The auxiliary's stay as they are: it is small,
            and a draft is only as good as its likelihoods.
        calibration: data set that Model Optimizer calibrates with: a local folder or a hub id.
        max_num_tokens: tokens an iteration runs at most, of both engines; default: enough for the longest prompt and
            for all rows' drafts at once.
        defaults: decoding parameters to put into `pair.json`.

    Raises:
        InvalidInput: something cannot be built, or would not be what was asked for.
    """
    for name, value, least in (
        ("rows", rows, 1),
        ("draft_len", draft_len, 1),
        ("beam_width", beam_width, 1),
        ("tensor_parallel", tensor_parallel, 1),
        ("max_num_tokens", 1 if max_num_tokens is None else max_num_tokens, 1),
    ):
        if value < least:
            raise InvalidInput(name, value, f"give at least {least}")
    for name, given, known in (
        ("dtype", dtype, TYPES),
        ("quantize", quantization, tuple(QUANTIZATIONS)),
        ("drafting", drafting, ("search", "samples", "steps")),
    ):
        if given not in known:
            raise InvalidInput(name, given, f"TensorRT-LLM engines: choose one of {', '.join(known)}")
    if capacity < 2 * BLOCK or capacity % BLOCK:
        raise InvalidInput("capacity", capacity, f"give a multiple of {BLOCK}, at least {2 * BLOCK}")
    if draft_len * beam_width >= capacity:
        raise InvalidInput("draft_len", draft_len, f"draft_len x beam_width must stay below the capacity, {capacity}")
    if (quantization == "none") != (calibration is None):
        problem = "quantized weights need a data set to be calibrated with, others none: a local folder or a hub id"
        raise InvalidInput("calibration", calibration, problem)
    checked = DecodingParams.from_dict(defaults or {})
    for name, asked, most in (
        ("draft_len", checked.drafted, draft_len),
        ("beam_width", checked.draft_width, beam_width),
    ):
        if asked > most:
            problem = f"requests ask for {asked} unless they say otherwise; build for that, or give other --defaults"
            raise InvalidInput(name, most, problem)
    models = [find("target", target), find("auxiliary", auxiliary)]
    shapes = [model.spec(rows, capacity, "float16", FORMAT) for model in models]
    tokenizers = [model.tokenizer() for model in models]
    size = common_vocabulary(*tokenizers, *(shape.vocab_size for shape in shapes))
    engines = []
    for role, model, shape in zip(("target", "auxiliary"), models, shapes, strict=True):
        is_target = role == "target"
        beams = beam_width if drafting == "search" and not is_target else 1
        batch = rows * beam_width // beams
        spec = ExecutorSpec(
            role="target" if is_target else "auxiliary",
            architecture=shape.architecture,
            vocab_size=shape.vocab_size,
            dtype=dtype,
            quantization=quantization if is_target else "none",
            tensor_parallel=tensor_parallel,
            rows=rows,
            capacity=capacity,
            draft_len=draft_len,
            beam_width=beam_width,
            max_batch_size=batch,
            max_input_len=capacity,
            max_seq_len=capacity,
            max_num_tokens=_tokens(role, max_num_tokens, batch, draft_len if is_target else 0, beams, capacity),
            max_beam_width=beams,
            max_draft_len=draft_len if is_target else 0,
            eos_token_ids=shape.eos_token_ids,
            checkpoint_hash=shape.checkpoint_hash,
            versions={
                "python": platform.python_version(),
                **{n: version(n) for n in ("mtad", "torch", "transformers")},
            },
        )
        _check(spec, model, shape)
        engines.append(
            EnginePlan(spec, model, _convert(spec, model, calibration), _build(spec), _memory(spec, model, shape))
        )
    description = {
        "vocab_size": size,
        "vocabulary_hash": vocabulary_hash(tokenizers[0].get_vocab()),
        "defaults": {k: v for k, v in asdict(checked).items() if k in (defaults or {})},
    }
    return Plan(engines[0], engines[1], description)


def build_pair(plan: Plan, folder: Path, overwrite: bool = False, run: Callable[..., Any] = subprocess.run) -> None:
    """Build what is planned into `folder`. Not executed.

    Args:
        plan: of the pair.
        folder: the pair folder.
        overwrite: replace an existing pair folder.
        run: starts `trtllm-build`.

    Raises:
        InvalidInput: the library is missing, the folder is in use, or the library refuses; nothing is left behind.
    """
    if folder.exists() and not (overwrite and (folder / "pair.json").is_file()):
        raise InvalidInput("pair", str(folder), "exists already; give another name, or --overwrite for a pair folder")
    if shutil.which("trtllm-build") is None:
        problem = "trtllm-build is not on PATH; install 'mtad[tensorrt-llm]' (docs/tensorrt-llm.md), or look at --plan"
        raise InvalidInput("to", FORMAT, problem)
    with write_folder(folder.absolute()) as temporary:
        for each in plan.engines:
            role = each.spec.role
            _converted(each, temporary / f"{role}.checkpoint")
            done = run(list(each.build), cwd=temporary, check=False)
            if done.returncode:
                raise InvalidInput(role, str(each.checkpoint.folder), f"trtllm-build failed: {' '.join(each.build)}")
            shutil.rmtree(temporary / f"{role}.checkpoint")
            each.checkpoint.tokenizer().save_pretrained(temporary / role)
            used = dict(each.spec.versions)
            with contextlib.suppress(PackageNotFoundError):
                used["tensorrt-llm"] = version("tensorrt-llm")
            write_executor_spec(temporary / role, replace(each.spec, versions=used))
        write_json(temporary / "pair.json", plan.description)


def _tokens(role: str, asked: int | None, batch: int, draft_len: int, beams: int, capacity: int) -> int:
    """`max_num_tokens`.

    The library raises a smaller one to `max_batch_size x (max_draft_len + 1)`, lowers a larger one than all requests
    can have, and cuts prompts that exceed it into pieces: of none of which the caller hears but in its log.
    """
    least, most = batch * max(draft_len + 1, beams), batch * capacity
    if asked is None:
        return min(max(least, capacity, LEAST_TOKENS), most)
    if asked < max(least, capacity):
        problem = (
            f"the {role} runs {batch} requests of {max(draft_len + 1, beams)} tokens at once, and texts of {capacity}; "
            f"give at least {max(least, capacity)}"
        )
        raise InvalidInput("max_num_tokens", asked, problem)
    if asked > most:
        raise InvalidInput("max_num_tokens", asked, f"the {role} can never have more than {most}; give at most that")
    return asked


def _check(spec: ExecutorSpec, checkpoint: Checkpoint, shape: EngineSpec) -> None:
    """Refuse what the library cannot build, before it has read the weights.

    Raises:
        InvalidInput: naming the size that does not fit.
    """
    if spec.architecture not in ARCHITECTURES:
        problem = f"{spec.architecture}: {', '.join(ARCHITECTURES)} are built for TensorRT-LLM here; use --to onnx"
        raise InvalidInput(spec.role, str(checkpoint.folder), problem)
    if spec.quantization != "none" and ARCHITECTURES[spec.architecture] is None:
        problem = f"{spec.architecture} has no quantized checkpoint in TensorRT-LLM here; leave it out"
        raise InvalidInput("quantize", spec.quantization, problem)
    parallel, sizes = spec.tensor_parallel, _sizes(checkpoint)
    for name, size in (("attention heads", sizes["heads"]), ("feed-forward size", sizes["feed_forward"])):
        if size % parallel:
            raise InvalidInput(
                "tensor_parallel", parallel, f"the {spec.role}'s {name}, {size}, cannot be divided by it"
            )
    if shape.kv_heads % parallel and parallel % shape.kv_heads:
        problem = f"the {spec.role}'s {shape.kv_heads} key-value heads can be neither divided nor repeated"
        raise InvalidInput("tensor_parallel", parallel, problem)
    for name, size in (("hidden size", sizes["hidden"]), ("feed-forward size", sizes["feed_forward"])):
        if spec.quantization == "int4_awq" and size // parallel % GROUP:
            problem = f"the {spec.role}'s {name}, {size // parallel} a GPU, is no multiple of {GROUP}"
            raise InvalidInput("quantize", spec.quantization, problem)


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    config = checkpoint.config.get_text_config()
    feed_forward = getattr(config, "ffn_dim", None) or getattr(config, "intermediate_size", 4 * config.hidden_size)
    return {"hidden": config.hidden_size, "heads": config.num_attention_heads, "feed_forward": feed_forward}


def _convert(spec: ExecutorSpec, checkpoint: Checkpoint, calibration: str | None) -> dict[str, Any]:
    """Who makes the library's checkpoint, and how."""
    folder, owner = str(checkpoint.folder), ARCHITECTURES[spec.architecture]
    mapping = {"world_size": spec.tensor_parallel, "tp_size": spec.tensor_parallel}
    if owner is None:
        return {"by": "export.opt_checkpoint.write_opt_checkpoint", "arguments": {"dtype": spec.dtype, **mapping}}
    if spec.quantization == "none":
        arguments = {"hf_model_or_dir": folder, "dtype": spec.dtype, "mapping": mapping, "load_model_on_cpu": True}
        return {"by": f"tensorrt_llm.models.{owner}.from_hugging_face", "arguments": arguments}
    quantized: dict[str, Any] = {"quant_algo": QUANTIZATIONS[spec.quantization]}
    if spec.quantization == "int4_awq":
        quantized["group_size"] = GROUP
    return {
        "by": f"tensorrt_llm.models.{owner}.quantize",
        "arguments": {
            "hf_model_dir": folder,
            "dtype": spec.dtype,
            "mapping": mapping,
            "quant_config": quantized,
            "calib_dataset": calibration,
        },
    }


def _converted(plan: EnginePlan, folder: Path) -> None:
    """Write the library's checkpoint."""
    spec, arguments = plan.spec, dict(plan.convert["arguments"])
    if ARCHITECTURES[spec.architecture] is None:
        model = plan.checkpoint.load("float32")
        assert isinstance(model, OPTForCausalLM)
        write_opt_checkpoint(model, folder, spec.dtype, spec.tensor_parallel)
        return
    mapping, models = import_module("tensorrt_llm").Mapping, import_module("tensorrt_llm.models")
    owner = getattr(models, str(ARCHITECTURES[spec.architecture]))
    parallel = arguments.pop("mapping")
    if spec.quantization != "none":
        quantized = arguments.pop("quant_config")
        quantized["quant_algo"] = import_module("tensorrt_llm.quantization").QuantAlgo[quantized["quant_algo"]]
        config = import_module("tensorrt_llm.models.modeling_utils").QuantConfig(**quantized)
        owner.quantize(**arguments, output_dir=str(folder), mapping=mapping(**parallel), quant_config=config)
        return
    for rank in range(spec.tensor_parallel):
        model = owner.from_hugging_face(**arguments, mapping=mapping(**parallel, rank=rank))
        model.save_checkpoint(str(folder), save_config=rank == 0)
        del model  # the next rank's weights take its place


def _build(spec: ExecutorSpec) -> tuple[str, ...]:
    """Arguments of `trtllm-build`."""
    values: dict[str, object] = {
        "checkpoint_dir": f"{spec.role}.checkpoint",
        "output_dir": spec.role,
        "gemm_plugin": "disable" if spec.quantization == "fp8" else spec.dtype,
        "use_paged_context_fmha": "enable",
        "kv_cache_type": "paged",
        "tokens_per_block": TOKENS_PER_BLOCK,
        "max_batch_size": spec.max_batch_size,
        "max_beam_width": spec.max_beam_width,
        "max_input_len": spec.max_input_len,
        "max_seq_len": spec.max_seq_len,
        "max_num_tokens": spec.max_num_tokens,
        "logits_dtype": "float32",
        "workers": spec.tensor_parallel,
    }
    if spec.role == "target":
        values |= {"speculative_decoding_mode": "draft_tokens_external", "max_draft_len": spec.max_draft_len}
    return "trtllm-build", *(str(part) for name, value in values.items() for part in (f"--{name}", value))


def _memory(spec: ExecutorSpec, checkpoint: Checkpoint, shape: EngineSpec) -> Memory:
    """What the engine takes on each GPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config)
    embeddings = {
        id(p) for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()
    }
    linear = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings)
    rest = sum(p.numel() for p in model.parameters() if p.dim() != 2 and id(p) not in embeddings)
    hidden, parallel = _sizes(checkpoint)["hidden"], spec.tensor_parallel
    each = {"none": 2.0, "fp8": 1.0, "int4_awq": 0.5 + 2 / GROUP}[spec.quantization]
    # the embedding is whole on every GPU, the head is split
    weights = linear * each / parallel + 2 * (rest + shape.vocab_size * hidden * (1 + 1 / parallel))
    # a beam's draft may fill what is left of a block, and begin one
    beams = spec.rows * spec.beam_width * (TOKENS_PER_BLOCK + spec.draft_len)
    tokens = spec.rows * spec.capacity + beams
    heads = max(1, math.ceil(shape.kv_heads / parallel))
    cache = 2 * shape.layers * heads * shape.head_dim * 2 * tokens
    logits = spec.max_batch_size * (spec.max_draft_len + spec.max_beam_width) * shape.vocab_size * 4
    return Memory(math.ceil(weights), tokens, cache, logits)


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
