"""How one TensorRT-LLM engine is made, as data, checked against limits that the library would silently change."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engines.base import EngineSpec
from engines.memory import format_bytes
from engines.tensorrt_llm_spec import ExecutorSpec
from export.checkpoint.checkpoint import Checkpoint
from mtad.errors import InvalidInput

ARCHITECTURES = {"LlamaForCausalLM": "LLaMAForCausalLM", "OPTForCausalLM": None}
"""Architectures, and the library's class that converts their checkpoints; None where `opt_checkpoint` does."""
TYPES = ("float16", "bfloat16")
QUANTIZATIONS = {"none": None, "fp8": "FP8", "int4_awq": "W4A16_AWQ"}
"""Of the weights, and the library's name for them (`QuantAlgo`)."""
GROUP = 128
"""Weights that share a scale, int4_awq."""
TOKENS_PER_BLOCK = 32
"""Tokens of a block of keys and values: what is reused at a time."""
LARGEST_TENSOR = 2**31 - 1
"""Elements of a tensor in TensorRT, at most."""


@dataclass(frozen=True)
class EnginePlan:
    """How one engine is made.

    Attributes:
        spec, checkpoint: what its `engine.json` will say, and what it is made of.
        convert: the step from the Hugging Face checkpoint to the library's: who does it, with which arguments.
        build: arguments of `trtllm-build`; folders relative to the pair's.
        memory: bytes that it takes on each GPU: `weights`, `cache` (keys and values), `activations` (the widest tensor
            of the largest iteration; the library's own are more) and `logits` (of one iteration, float32).
    """

    spec: ExecutorSpec
    checkpoint: Checkpoint
    convert: dict[str, Any]
    build: tuple[str, ...]
    memory: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        memory = {**self.memory, "total": sum(self.memory.values())}
        made = {"convert": self.convert, "build": list(self.build), "memory": memory}
        return {"source": str(self.checkpoint.folder), "engine": asdict(self.spec), **made}

    def __str__(self) -> str:
        spec, parts = self.spec, " + ".join(f"{name} {format_bytes(size)}" for name, size in self.memory.items())
        return (
            f"{spec.role}: {spec.architecture}, {spec.dtype}, weights {spec.quantization}, "
            f"{spec.tensor_parallel} GPU{'s' * (spec.tensor_parallel > 1)}\n"
            f"  {spec.rows} rows of {spec.capacity} tokens, {spec.max_batch_size} requests at once, "
            f"{spec.max_num_tokens} tokens per iteration, drafts of {spec.draft_len} x {spec.beam_width} beams\n"
            f"  memory per GPU: {parts} = {format_bytes(sum(self.memory.values()))}\n"
            f"  convert: {self.convert['by']} {json.dumps(self.convert['arguments'])}\n"
            f"  build:   {' '.join(self.build)}"
        )


def plan_engine(spec: ExecutorSpec, checkpoint: Checkpoint, shape: EngineSpec, calibration: str | None) -> EnginePlan:
    """Plan an engine; nothing is read but the checkpoint's configuration.

    Args:
        spec, checkpoint: what it is to be, and what it is made of; `shape` is what one of our own engines would be.
        calibration: data set, for weights that are quantized.

    Raises:
        InvalidInput: the library could not build it; the size that does not fit is named.
    """
    config = checkpoint.config.get_text_config()
    feed_forward = getattr(config, "ffn_dim", None) or getattr(config, "intermediate_size", 4 * config.hidden_size)
    parallel, hidden = spec.tensor_parallel, config.hidden_size

    def refused(field: str, value: object, problem: str) -> InvalidInput:
        return InvalidInput(field, value, f"the {spec.role}'s {problem}")

    if spec.architecture not in ARCHITECTURES:
        problem = f"architecture, {spec.architecture}, is none of {', '.join(ARCHITECTURES)}; use --to onnx"
        raise refused(spec.role, str(checkpoint.folder), problem)
    gated = ARCHITECTURES[spec.architecture] is not None
    if spec.quantization != "none" and not gated:
        problem = f"architecture, {spec.architecture}, has no quantized checkpoint in TensorRT-LLM here; leave it out"
        raise refused("quantize", spec.quantization, problem)
    for name, size in (("attention heads", config.num_attention_heads), ("feed-forward size", feed_forward)):
        if size % parallel:
            raise refused("tensor_parallel", parallel, f"{name}, {size}, cannot be divided by it")
    if shape.kv_heads % parallel and parallel % shape.kv_heads:
        problem = f"{shape.kv_heads} key-value heads can be neither divided nor repeated"
        raise refused("tensor_parallel", parallel, problem)
    for name, size in (("hidden size", hidden), ("feed-forward size", feed_forward)):
        if spec.quantization == "int4_awq" and size // parallel % GROUP:
            problem = f"{name}, {size // parallel} per GPU, is no multiple of {GROUP}"
            raise refused("quantize", spec.quantization, problem)
    widest = max(hidden, (1 + gated) * feed_forward // parallel)  # a gated layer has two of its parts in one tensor
    if spec.max_num_tokens * widest > LARGEST_TENSOR:
        problem = (
            f"{spec.max_batch_size} requests of {spec.capacity} tokens are more than the {LARGEST_TENSOR // widest} "
            "that a tensor holds per iteration; give fewer rows, less capacity or fewer beams"
        )
        raise refused("capacity", spec.capacity, problem)
    memory = {
        "weights": _weights(spec, checkpoint, shape.vocab_size * hidden),
        "cache": 4 * shape.layers * max(1, math.ceil(shape.kv_heads / parallel)) * shape.head_dim * spec.kv_tokens,
        "activations": 2 * spec.max_num_tokens * widest,
        "logits": 4 * spec.max_batch_size * (spec.max_draft_len + spec.max_beam_width) * shape.vocab_size,
    }
    return EnginePlan(spec, checkpoint, _convert(spec, checkpoint, calibration), _build(spec), memory)


def sizes(rows: int, capacity: int, requests: int, beams: int, draft_len: int) -> dict[str, Any]:
    """Sizes with which all requests of a block run in one iteration.

    The library charges each request its whole text, not the part of it that it need not compute, and does so twice:
    in tokens (`cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp`) and in blocks of keys and values
    (`capacityScheduler.cpp`, `kvCacheManager.cpp`: getRemainingBlocksToCompletion). Where they do not fit, requests
    run one after another.

    Args:
        rows, capacity, requests: texts decoded at once, tokens of a text, requests of each.
        beams, draft_len: beams of a request, and tokens that it generates.
    """
    blocks = -(-capacity // TOKENS_PER_BLOCK) + beams * (1 + -(-draft_len // TOKENS_PER_BLOCK))
    return {
        "max_batch_size": rows * requests,
        "max_num_tokens": rows * requests * capacity,
        "kv_tokens": rows * requests * blocks * TOKENS_PER_BLOCK,
    }


def _convert(spec: ExecutorSpec, checkpoint: Checkpoint, calibration: str | None) -> dict[str, Any]:
    folder, owner = str(checkpoint.folder), f"tensorrt_llm.models.{ARCHITECTURES[spec.architecture]}"
    mapping = {"world_size": spec.tensor_parallel, "tp_size": spec.tensor_parallel}
    common: dict[str, Any] = {"dtype": spec.dtype, "mapping": mapping}
    if ARCHITECTURES[spec.architecture] is None:
        return {"by": "export.tensorrt_llm.opt_checkpoint.write_opt_checkpoint", "arguments": common}
    if spec.quantization == "none":
        arguments = {"hf_model_or_dir": folder, "load_model_on_cpu": True, **common}
        return {"by": f"{owner}.from_hugging_face", "arguments": arguments}
    quantized: dict[str, object] = {"quant_algo": QUANTIZATIONS[spec.quantization]}
    quantized |= {"group_size": GROUP} if spec.quantization == "int4_awq" else {}
    arguments = {"hf_model_dir": folder, "quant_config": quantized, "calib_dataset": calibration, **common}
    return {"by": f"{owner}.quantize", "arguments": arguments}


def _build(spec: ExecutorSpec) -> tuple[str, ...]:
    values: dict[str, object] = {
        "checkpoint_dir": f"{spec.role}.checkpoint",
        "output_dir": spec.role,
        "gemm_plugin": "disable" if spec.quantization == "fp8" else spec.dtype,
        "use_paged_context_fmha": "enable",
        "kv_cache_type": "paged",
        "tokens_per_block": TOKENS_PER_BLOCK,
        "max_batch_size": spec.max_batch_size,
        "max_beam_width": spec.max_beam_width,
        "max_input_len": spec.capacity,
        # what a request may generate is charged beside its draft (batch_manager/llmRequest.h: validate)
        "max_seq_len": spec.capacity + spec.max_draft_len + 1,
        "max_num_tokens": spec.max_num_tokens,
        "logits_dtype": "float32",
        "workers": spec.tensor_parallel,
    }
    if spec.role == "target":
        values |= {"speculative_decoding_mode": "draft_tokens_external", "max_draft_len": spec.max_draft_len}
    return "trtllm-build", *(str(part) for name, value in values.items() for part in (f"--{name}", value))


def _weights(spec: ExecutorSpec, checkpoint: Checkpoint, embedding: int) -> int:
    """Bytes of the weights on each GPU; `embedding` elements are whole on every one, and once more, split, the head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config, trust_remote_code=False)
    apart = {id(p) for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()}
    linear: int = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in apart)
    rest: int = sum(p.numel() for p in model.parameters() if p.dim() != 2 and id(p) not in apart)
    each = {"none": 2.0, "fp8": 1.0, "int4_awq": 0.5 + 2 / GROUP}[spec.quantization]
    split: float = linear * each / spec.tensor_parallel
    return math.ceil(split + 2 * (rest + embedding * (1 + 1 / spec.tensor_parallel)))
