"""The library, imported when first used, and checked to have what is used of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mtad.errors import InvalidInput

ENGINES, WORKER = "1.2.1", "1.4.0rc1"
"""The releases that the executors and the worker are written for. Later than 1.2 there are no engines any more."""

EXECUTOR: dict[str, tuple[str, ...]] = {
    "Executor": ("model_path", "model_type", "executor_config"),
    "Executor.enqueue_requests": ("requests",),
    "Executor.await_responses": ("timeout",),
    "Executor.cancel_request": ("id",),
    "ExecutorConfig": (
        *("max_beam_width", "kv_cache_config", "enable_chunked_context", "normalize_log_probs", "max_batch_size"),
        *("max_num_tokens", "parallel_config", "extended_runtime_perf_knob_config", "gather_generation_logits"),
    ),
    "ExternalDraftTokensConfig": ("tokens", "logits", "acceptance_threshold"),
    "KvCacheConfig": ("enable_block_reuse", "max_tokens", "enable_partial_reuse", "copy_on_partial_reuse"),
    "OutputConfig": ("return_log_probs", "return_generation_logits", "exclude_input_from_output"),
    "ParallelConfig": ("device_ids",),
    "Request": (
        *("input_token_ids", "max_tokens", "sampling_config", "output_config", "end_id"),
        *("external_draft_tokens_config", "cache_salt_id"),
    ),
    "SamplingConfig": ("beam_width", "top_p"),
    **dict.fromkeys(("Executor.shutdown", "ExtendedRuntimePerfKnobConfig", "OrchestratorConfig"), ()),
    **dict.fromkeys(("CommunicationMode.ORCHESTRATOR", "ModelType.DECODER_ONLY"), ()),
}
"""Of `tensorrt_llm.bindings.executor`: names, and the parameters that are passed to them by name."""


def executor_bindings() -> Any:
    """The module `tensorrt_llm.bindings.executor`.

    Raises:
        InvalidInput: the library is not installed, cannot be loaded, or lacks what is used of it.
    """
    bindings = load("tensorrt_llm.bindings.executor", ENGINES)
    check(bindings, EXECUTOR, ENGINES)
    return bindings


def load(name: str, release: str) -> Any:
    """Import a module of the library; `release` has it.

    Raises:
        InvalidInput: the library is not installed, is another release, or cannot be loaded on this machine.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        problem = "not installed" if error.name == "tensorrt_llm" else f"{error.name} is missing"
        problem += f"; pip install tensorrt-llm=={release} from NVIDIA's package index (docs/tensorrt-llm.md)"
        raise InvalidInput("tensorrt-llm", installed(), problem) from error
    except Exception as error:  # its libraries' own: a driver, CUDA or MPI that is not there
        raise InvalidInput("tensorrt-llm", installed(), f"cannot be loaded on this machine: {error}") from error


def installed() -> str | None:
    """The version that is installed; None for none."""
    try:
        return version("tensorrt-llm")
    except PackageNotFoundError:
        return None


def check(module: Any, used: Mapping[str, Sequence[str]], release: str) -> None:
    """See to it that a module has what is `used`: by name in it (`Class.method`), parameters; `release` has them.

    Raises:
        InvalidInput: something is missing; all that is is named.
    """
    missing = []
    for path, names in used.items():
        owner = module
        for part in path.split("."):
            owner = getattr(owner, part, None)
        if owner is None:
            missing.append(path)
            continue
        known = parameters(owner) if names else None
        if known is not None:
            missing += [f"{path}({name}=)" for name in names if name not in known]
    if missing:
        problem = f"{module.__name__} lacks {', '.join(missing)}; install tensorrt-llm=={release}"
        raise InvalidInput("tensorrt-llm", installed(), problem)


def parameters(owner: Any) -> set[str] | None:
    """Names of a callable's parameters; None where it does not tell, or takes any.

    Functions of nanobind have no Python signature. Their docstring has one line for each overload.
    """
    try:
        found = inspect.signature(owner).parameters.values()
    except (TypeError, ValueError):
        function = owner.__init__ if inspect.isclass(owner) else owner
        return set(re.findall(r"[(,]\s*(\w+)\s*:", function.__doc__ or "")) or None
    return None if any(p.kind is p.VAR_KEYWORD for p in found) else {p.name for p in found}
