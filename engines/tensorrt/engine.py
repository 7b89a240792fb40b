"""TensorRT engine: a plan on the cache that torch owns, drafting and scoring as CUDA graphs. Not executed on a GPU."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engines.base import INPUTS, Engine, EngineSpec, Step, cache_tensors
from engines.cache.columns import ColumnCache, write_columns
from engines.folder import cache_folder
from engines.graphs.capture import CudaRecorder, NoRecorder, Recorder, Work
from engines.graphs.runner import GraphRunner, StepShape, deliver_logits, prefill_chunks
from engines.kinds import FORMATS
from engines.placement import Placement
from engines.tensorrt_plan import TensorRtPlan, check_plan, current_gpu, load_runtime
from mtad.errors import InvalidInput

log = logging.getLogger(__name__)

PREFILL, DECODE = 0, 1
"""Optimization profiles of a plan: one row of many tokens; many rows of a tree's tokens."""

MAX_CONTEXTS = 32
"""Captured steps that are kept. Each has an execution context, whose size TensorRT does not tell."""


def open_tensorrt(folder: Path, spec: EngineSpec, placement: Placement) -> TensorRTEngine:
    """Open a plan of TensorRT or TensorRT-RTX, if it runs here. On a GPU: not executed.

    Raises:
        InvalidInput: the runtime is missing or of another version, or there is no GPU, or another than the plan's.
            Found out before a runtime is created: TensorRT's ends the process where there is no GPU.
    """
    assert spec.plan is not None
    trt = load_runtime(spec.format)
    check_plan(spec.format, spec.plan, str(trt.__version__), current_gpu())
    device = placement.device if placement.on_gpu else "cuda"
    return TensorRTEngine(folder, spec, trt, (CudaRecorder if placement.graphs else NoRecorder)(device), device)


class TensorRTEngine(Engine):
    """A step is one enqueue, or one replay of its graph, on bound memory.

    `past_*` and `present_*` of a layer are one address, as TensorRT's KVCacheUpdate asks; a plan whose attention is
    decomposed gives the new columns instead, and they are copied into the cache behind it. Steps of the decode profile
    that keep logits are replayed as CUDA graphs, each with an execution context of its own: a graph holds addresses of
    its context's state. All contexts share one piece of memory for activations, as no two steps run at once. Other
    steps, such as prompts, run without a graph with the prefill profile, a row at a time, in chunks that fit it.

    Logits lie where `engines.graphs.runner.deliver_logits` says.

    Not executed: what needs a GPU. The calls are tested on a stand-in with the runtime's signatures.

    Args:
        spec: its specification, with a plan that this process can run (`open_tensorrt`).
        trt: the runtime's module, `tensorrt` or `tensorrt_rtx`.

    Raises:
        InvalidInput: more rows than the plan has, or a plan that the runtime does not take.
    """

    cache: ColumnCache

    def __init__(self, folder: Path, spec: EngineSpec, trt: ModuleType, recorder: Recorder, device: str) -> None:
        plan = spec.plan
        assert plan is not None
        if spec.rows > plan.decode_rows:
            problem = f"the plan was built for {plan.decode_rows} rows; give at most that, or export again"
            raise InvalidInput("rows", spec.rows, problem)
        super().__init__(spec, ColumnCache(spec, device))
        self._plan: TensorRtPlan = plan
        self._trt, (self._runtime, self._engine) = trt, load_plan(trt, folder / "model.engine")
        self._config = self._runtime_config() if FORMATS[spec.format].ahead_of_time else None
        if spec.attention == "operator":
            self._check_aliases()
        size = max(self._engine.get_device_memory_size_for_profile_v2(profile) for profile in (PREFILL, DECODE))
        self._activations = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        with recorder.ordered():
            self._prefill = self._context(PREFILL)
        limits = (
            StepShape(1, plan.prefill_tokens, spec.capacity, plan.prefill_tokens),
            StepShape(spec.rows, plan.decode_tokens, spec.capacity, plan.decode_tokens),
        )
        self._new: Tensor | None = None
        if spec.attention == "decomposed":
            tokens = max(limit.rows * limit.steps for limit in limits)
            count = spec.layers * 2 * tokens * spec.kv_heads * spec.head_dim
            self._new = torch.zeros(count, dtype=spec.torch_dtype, device=device)
        self.graphs = GraphRunner(self._bind_new, spec, limits, recorder, device, MAX_CONTEXTS)

    def step(self, step: Step) -> Tensor:
        rows, tokens = step.tokens.shape
        if step.first_row == 0 and len(step.keep) > 0 and tokens <= self._plan.decode_tokens:
            return deliver_logits(self.graphs.replay(step), step)
        shape = rows, len(step.keep), self.spec.vocab_size
        out = torch.empty(shape, dtype=self.spec.torch_dtype, device=step.tokens.device)
        for chunk, row, kept in prefill_chunks(step, self._plan.prefill_tokens):
            logits = self.graphs.run(chunk, lambda static: self._bind(static, self._prefill)())
            if len(kept):
                out[row, kept] = logits[0].to(out.device)
        return out

    def _bind_new(self, static: Step) -> Work:
        return self._bind(static, self._context(DECODE))

    def _bind(self, static: Step, context: Any) -> Work:
        """Set a context's shapes and addresses to those of a step in static memory; gives its work."""
        rows, tokens = static.tokens.shape
        cache = self.cache.of(static)
        inputs: dict[str, Tensor] = {name: getattr(static, name) for name in INPUTS} | cache_tensors("past", cache)
        assert static.out is not None
        outputs, new = {"logits": static.out}, None
        if self._new is None:
            outputs |= cache_tensors("present", cache)
        else:
            sizes = self.spec.layers, 2, rows, self.spec.kv_heads, tokens, self.spec.head_dim
            new = self._new[: torch.Size(sizes).numel()].view(sizes)
            outputs |= cache_tensors("new", new)
        for name, tensor in inputs.items():
            shape = tuple(tensor.shape)
            accepted(context.set_input_shape(name, shape), f"shape of {name}", shape)
        for name, tensor in {**inputs, **outputs}.items():
            assert tensor.is_contiguous(), name
            address = tensor.data_ptr()
            accepted(context.set_tensor_address(name, address), f"address of {name}", hex(address))
        unknown = context.infer_shapes()
        accepted(not unknown, "inputs without a shape", unknown)

        def work() -> None:
            accepted(context.execute_async_v3(self._stream()), "enqueue of", StepShape.of(static))
            if new is not None:
                write_columns(cache, new, static.write_at)

        return work

    def _context(self, profile: int) -> Any:
        context = self._engine.create_execution_context(
            self._config or self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        accepted(context is not None, "execution context of profile", profile)
        accepted(context.set_optimization_profile_async(profile, self._stream()), "optimization profile", profile)
        context.set_device_memory(self._activations.data_ptr(), self._activations.numel())
        return context

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.device.type == "cuda" else 0

    def _runtime_config(self) -> Any:
        """How TensorRT-RTX makes contexts: their memory is ours, and a shape's kernels are compiled before it runs.

        Left to itself it would go on compiling behind the first runs, and a graph would keep the slower kernels. Its
        own graphs are off: these steps are captured here. What it compiled is kept for the next process.
        """
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.dynamic_shapes_kernel_specialization_strategy = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
        config.cuda_graph_strategy = self._trt.CudaGraphStrategy.DISABLED
        kernels, path = (
            config.create_runtime_cache(),
            cache_folder() / "tensorrt-rtx" / f"{self.spec.build_hash}.kernels",
        )
        if path.is_file() and not kernels.deserialize(path.read_bytes()):
            log.info("kernels are compiled anew: those of %s are of another GPU, driver or version", path)
        config.set_runtime_cache(kernels)
        weakref.finalize(self, _write_kernels, kernels, path)
        return config

    def _check_aliases(self) -> None:
        """Every present must be written where its past lies; TensorRT says which outputs are."""
        for layer in range(self.spec.layers):
            for name in ("key", "value"):
                alias = self._engine.get_aliased_input_tensor(f"present_{name}.{layer}")
                accepted(alias == f"past_{name}.{layer}", f"alias of present_{name}.{layer}", alias)


def _write_kernels(kernels: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(kernels.serialize())
    temporary.replace(path)


def load_plan(trt: ModuleType, path: Path) -> tuple[Any, Any]:
    """The runtime, which has to outlive it, and the engine of a plan.

    Raises:
        InvalidInput: the runtime does not take it; it says why on its log, which goes to ours.
    """

    class Log(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            serious = severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)
            log.log(logging.ERROR if serious else logging.DEBUG, "TensorRT: %s", message)

    runtime = trt.Runtime(Log())
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise InvalidInput("plan", str(path), "the runtime cannot load it (see its log); export again")
    return runtime, engine


def accepted(answer: bool, what: str, value: object) -> None:
    """TensorRT refuses by returning False; its log says why."""
    if not answer:
        raise RuntimeError(f"TensorRT refused the {what} {value}")
