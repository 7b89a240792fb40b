"""Plans of TensorRT-LLM 1.2, compiled from a checkpoint. What can be refused is refused first; never executed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path

from engines.base import KV_PAGE, EngineSpec
from engines.placement import versions
from engines.tensorrt_llm.cache import spare_pages
from engines.tensorrt_llm.library import RELEASE
from engines.tensorrt_plan import TensorRtPlan, current_gpu, load_runtime
from export.checkpoint.checkpoint import Checkpoint
from export.tensorrt import DECODE_TOKENS, PREFILL_TOKENS
from mtad.errors import InvalidInput

ARCHITECTURE, LIBRARYS = "LlamaForCausalLM", "LLaMAForCausalLM"
"""The architecture that is built, and the library's class for it: its layers take masks of trees."""
CAPABILITIES = ((8, 0), (9, 0))
"""Least and largest compute capability whose attention kernels take masks of trees (`kernels/xqaDispatcher.cpp`)."""
LARGEST_GROUP, LARGEST_HEAD = 32, 256
"""Query heads of a KV head, a power of two, and their size, a multiple of 16, for which those kernels are compiled
(`decoderXQAImplJIT/decoderXQAImplJIT.cpp`)."""


def plan_for(spec: EngineSpec, checkpoint: Checkpoint) -> TensorRtPlan:
    """What a plan of `spec` would be built with and for.

    Raises:
        InvalidInput: it cannot be built here, or the library would end the process when it runs: it has no kernel.
    """
    config, name, source = checkpoint.config.get_text_config(), checkpoint.name, str(checkpoint.folder)
    if not checkpoint.plain:
        raise InvalidInput(name, source, "TensorRT-LLM reads plain checkpoints only; use --to torch")
    if spec.architecture != ARCHITECTURE:
        problem = f"architecture {spec.architecture} is not built for TensorRT-LLM, {ARCHITECTURE} is; use --to torch"
        raise InvalidInput(name, source, problem)
    group = config.num_attention_heads // spec.kv_heads
    if group & (group - 1) or group > LARGEST_GROUP or spec.head_dim % 16 or spec.head_dim > LARGEST_HEAD:
        problem = f"no kernel for trees of {group} query heads per KV head, of size {spec.head_dim}"
        raise InvalidInput(name, source, f"{problem}; use --to torch")
    if (window := getattr(config, "sliding_window", None)) is not None and window < spec.capacity:
        raise InvalidInput(name, source, f"a sliding window of {window}: TensorRT-LLM has no kernel for its trees")
    found = versions("tensorrt-llm").get("tensorrt-llm")
    if found is None or found.partition("+")[0] != RELEASE or shutil.which("trtllm-build") is None:
        problem = f"release {RELEASE} builds plans, with trtllm-build on PATH; the extra tensorrt-llm installs it"
        raise InvalidInput("tensorrt-llm", found, f"{problem} in an environment of its own (docs/tensorrt-llm.md)")
    trt, gpu = load_runtime(spec.format), current_gpu()
    if gpu is None:
        raise InvalidInput("to", spec.format, "it builds on the GPU that will run the plan, but torch finds none")
    major, _, minor = gpu.compute_capability.partition(".")
    if not CAPABILITIES[0] <= (int(major), int(minor)) <= CAPABILITIES[1]:
        problem = f"TensorRT-LLM {RELEASE} has no kernel for trees on compute capability {gpu.compute_capability}"
        raise InvalidInput("device", gpu.name, f"{problem}, but on 8.0 to 9.0; use --to torch")
    sizes = spec.rows, DECODE_TOKENS, min(max(PREFILL_TOKENS, spec.rows * DECODE_TOKENS), spec.capacity)
    return TensorRtPlan(str(trt.__version__), gpu.name, (gpu.compute_capability,), *sizes)


def build_plan(folder: Path, checkpoint: Checkpoint, spec: EngineSpec) -> None:
    """Convert a checkpoint and build its plan, `model.engine` in `folder`. Not executed."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        converted, built = Path(temporary, "checkpoint"), Path(temporary, "plan")
        library = getattr(import_module("tensorrt_llm.models"), LIBRARYS)
        model = library.from_hugging_face(str(checkpoint.folder), dtype=spec.dtype, load_model_on_cpu=True)
        converted.mkdir()  # the library does not (`models/modeling_utils.py`)
        model.save_checkpoint(str(converted))
        command = build_command(spec, converted, built)
        if subprocess.run(command, check=False).returncode:
            raise InvalidInput(checkpoint.name, str(checkpoint.folder), f"trtllm-build failed: {' '.join(command)}")
        shutil.move(built / "rank0.engine", folder / "model.engine")


def build_command(spec: EngineSpec, converted: Path, built: Path) -> list[str]:
    """What builds a plan: an ordinary model whose generation phase takes the tokens of a tree (`commands/build.py`).

    The library adds `max_draft_len` to `max_seq_len` itself (`builder.py`).
    """
    plan = spec.plan
    assert plan is not None
    options = {
        "checkpoint_dir": converted,
        "output_dir": built,
        "speculative_decoding_mode": "lookahead_decoding",
        "max_draft_len": plan.decode_tokens - 1,
        "gemm_plugin": "auto",
        "use_paged_context_fmha": "enable",
        "remove_input_padding": "enable",
        "kv_cache_type": "paged",
        "tokens_per_block": KV_PAGE,
        "max_batch_size": plan.decode_rows,
        "max_beam_width": 1,
        "max_input_len": spec.capacity,
        "max_seq_len": spec.capacity + KV_PAGE * spare_pages(plan.decode_tokens),
        "max_num_tokens": max(plan.prefill_tokens, plan.decode_rows * plan.decode_tokens),
        "logits_dtype": "float32",
    }
    return ["trtllm-build", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
