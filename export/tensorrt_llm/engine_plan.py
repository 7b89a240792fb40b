"""How one TensorRT-LLM engine is made, as data, checked against limits that the library would silently change."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engines.base import EngineSpec
from engines.tensorrt_llm_spec import ExecutorSpec
from export.checkpoint.checkpoint import Checkpoint
from mtad.errors import InvalidInput

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
class ExecutorMemory:
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
    memory: ExecutorMemory

    def __str__(self) -> str:
        spec, memory = self.spec, self.memory
        return (
            f"{spec.role}: {spec.architecture}, {spec.dtype}, weights {spec.quantization}, "
            f"{spec.tensor_parallel} GPU{'s' * (spec.tensor_parallel > 1)}\n"
            f"  {spec.rows} rows of {spec.capacity} tokens, {spec.max_batch_size} requests at once, "
            f"{spec.max_num_tokens} tokens an iteration, drafts of {spec.draft_len} x {spec.beam_width} beams\n"
            f"  memory a GPU: weights {_bytes(memory.weights)} + keys and values of {memory.tokens} tokens "
            f"{_bytes(memory.cache)} + logits {_bytes(memory.logits)} = {_bytes(memory.total)}\n"
            f"  convert: {self.convert['by']} {json.dumps(self.convert['arguments'])}\n"
            f"  build:   {' '.join(self.build)}"
        )


def plan_engine(
    spec: ExecutorSpec, checkpoint: Checkpoint, shape: EngineSpec, calibration: str | None = None
) -> EnginePlan:
    """Plan an engine; nothing is read but the checkpoint's configuration.

    Args:
        spec: what it is to be.
        checkpoint: what it is made of.
        shape: of the same, as an engine with a cache of ours would have it.
        calibration: data set, for weights that are quantized.

    Raises:
        InvalidInput: the library could not build it.
    """
    _check(spec, checkpoint, shape)
    convert = _convert(spec, checkpoint, calibration)
    return EnginePlan(spec, checkpoint, convert, _build(spec), _memory(spec, checkpoint, shape))


def tokens_of(role: str, asked: int | None, batch: int, draft_len: int, beams: int, capacity: int) -> int:
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
        return {
            "by": "export.tensorrt_llm.opt_checkpoint.write_opt_checkpoint",
            "arguments": {"dtype": spec.dtype, **mapping},
        }
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


def _build(spec: ExecutorSpec) -> tuple[str, ...]:
    """Arguments that `trtllm-build` is started with."""
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


def _memory(spec: ExecutorSpec, checkpoint: Checkpoint, shape: EngineSpec) -> ExecutorMemory:
    """What the engine takes on each GPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config, trust_remote_code=False)
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
    return ExecutorMemory(math.ceil(weights), tokens, cache, logits)


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
