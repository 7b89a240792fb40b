"""TensorRT engine: a plan on the cache that torch owns. Not executed on a GPU."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engines.base import INPUTS, Engine, EngineSpec, Step, cache_tensors
from engines.cache.base import KvCache
from engines.cache.columns import ColumnCache, write_columns
from engines.folder import cache_folder
from engines.kinds import FORMATS
from engines.placement import Placement
from engines.tensorrt_plan import TensorRtPlan, check_plan, current_gpu, load_runtime
from mtad.errors import InvalidInput

log = logging.getLogger(__name__)

PREFILL, DECODE = 0, 1
"""Optimization profiles of a plan: one row of many tokens; many rows of a tree's tokens."""
MAX_CONTEXTS = 256
"""Execution contexts that are kept, one per shape of a step; blocks captured at start have up to some hundred."""
ALIGNED = 256
"""Bytes of which addresses are multiples (`NvInferRuntime.h`: setTensorAddress); torch's allocations are."""


def open_tensorrt(folder: Path, spec: EngineSpec, placement: Placement) -> TensorRTEngine:
    """Open a plan of TensorRT or TensorRT-RTX, if it runs here; see `runtime_of`. On a GPU: not executed."""
    return TensorRTEngine(folder, spec, *runtime_of(spec, placement))


def runtime_of(spec: EngineSpec, placement: Placement) -> tuple[ModuleType, str]:
    """The runtime's module and the device of an engine whose plan runs here.

    Raises:
        InvalidInput: the runtime is missing or of another version, or there is no GPU, or another than the plan's.
            Found out before a runtime is created: TensorRT's ends the process where there is no GPU.
    """
    assert spec.plan is not None
    trt = load_runtime(spec.format)
    if placement.on_gpu:
        torch.cuda.set_device(placement.device)  # stays so: engines and contexts belong to the current one
    check_plan(spec.format, spec.plan, str(trt.__version__), current_gpu())
    return trt, placement.device if placement.on_gpu else "cuda"


class PlanEngine(Engine):
    """What engines of a plan have in common: the plan, one piece of memory for activations, and execution contexts.

    Args:
        spec: with a plan that this process can run (`runtime_of`).
        trt: the runtime's module.
        cache: makes the cache of a specification.
        profiles: optimization profiles that contexts are made for.

    Raises:
        InvalidInput: more rows than the plan has, or a plan that the runtime does not take.
    """

    capturable = True

    def __init__(
        self, folder: Path, spec: EngineSpec, trt: ModuleType, cache: Callable[[], KvCache], profiles: tuple[int, ...]
    ) -> None:
        assert spec.plan is not None
        self._plan: TensorRtPlan = spec.plan
        if spec.rows > self._plan.decode_rows:
            problem = f"the plan was built for {self._plan.decode_rows} rows; give at most that, or export again"
            raise InvalidInput("rows", spec.rows, problem)
        super().__init__(spec, cache())
        self._trt, (self._runtime, self._engine) = trt, load_plan(trt, folder / "model.engine")
        size = max(1, *(self._engine.get_device_memory_size_for_profile_v2(profile) for profile in profiles))
        self._activations = torch.empty(size, dtype=torch.uint8, device=self.device)

    def step(self, step: Step) -> Tensor:
        placed = {name: getattr(step, name).to(self.device) for name in INPUTS}
        return self.enqueue(replace(step, **placed)).to(step.tokens.device)

    def _context(self, profile: int, config: Any = None) -> Any:
        how = config or self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(how)
        accepted(context is not None, "execution context of profile", profile)
        accepted(context.set_optimization_profile_async(profile, self._stream()), "optimization profile", profile)
        context.set_device_memory(self._activations.data_ptr(), self._activations.numel())
        return context

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.device.type == "cuda" else 0


class TensorRTEngine(PlanEngine):
    """A step is one enqueue on bound memory, and can be part of a captured block.

    `past_*` and `present_*` of a layer are one address, as TensorRT's KVCacheUpdate asks; a plan whose attention is
    decomposed gives the new columns instead, and they are copied into the cache behind it. Steps of the decode profile
    that keep logits run in an execution context of their shape, because a graph holds addresses of its context's state.
    All contexts share one piece of memory for activations, as no two steps run at once. Other steps, such as prompts,
    run with the prefill profile, a row at a time, in chunks that fit it.

    The last columns of the plan's static cache take what padded rows write: a row's capacity is so much smaller.

    Not executed: what needs a GPU. The calls are tested on a stand-in with the runtime's signatures.
    """

    cache: ColumnCache

    def __init__(self, folder: Path, spec: EngineSpec, trt: ModuleType, device: str) -> None:
        super().__init__(folder, spec, trt, partial(ColumnCache, spec, device), (PREFILL, DECODE))
        self.spec = replace(spec, capacity=spec.capacity - FORMATS[spec.format].spare_columns)
        configs = self._runtime_configs() if FORMATS[spec.format].ahead_of_time else (None, None, None)
        if spec.attention == "operator":
            self._check_aliases()
        self._prefill, self._decode = self._context(PREFILL, configs[0]), configs[1]
        self._contexts: dict[tuple[int, ...], Any] = {}
        self._kernels = configs[2]  # contexts may still be adding to them

    @property
    def captured_on(self) -> object:
        return self._contexts

    def enqueue(self, step: Step) -> Tensor:
        """Logits [R, N, V] in new memory: a block reads those of all its levels."""
        (rows, tokens), kept = step.tokens.shape, len(step.keep)
        if step.first_row == 0 and kept and not step.is_prompt and tokens <= self._plan.decode_tokens:
            shape = rows, tokens, step.mask.shape[3], kept
            if len(self._contexts) == MAX_CONTEXTS and shape not in self._contexts:
                self._dropped, self._contexts = self._contexts, {}  # what still runs there needs them a while longer
            context = self._contexts.get(shape) or self._context(DECODE, self._decode)
            logits = self._run(step, context, shape not in self._contexts)
            self._contexts[shape] = context  # now that its shapes are set
            return logits
        found = torch.empty(rows, kept, self.spec.vocab_size, dtype=self.spec.torch_dtype, device=self.device)
        for chunk, row, at in prefill_chunks(step, self._plan.prefill_tokens):
            logits = self._run(chunk, self._prefill, True)
            if len(at):
                found[row, at] = logits[0]
        return found

    def _run(self, step: Step, context: Any, reshaped: bool) -> Tensor:
        """Enqueue a step on copies of its inputs, which begin at addresses that TensorRT takes.

        Args:
            reshaped: the context ran a step of another shape before, or none.
        """
        spec, (rows, tokens), cache = self.spec, step.tokens.shape, self.cache.of(step)
        keep = step.keep if len(step.keep) else step.write_at.new_zeros(1)  # a plan keeps a position at least
        parts = {**{name: getattr(step, name) for name in INPUTS}, "keep": keep}
        inputs = {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}
        behind = cache.shape[4] if spec.attention == "operator" else step.mask.shape[3]
        inputs["write_at"].clamp_(max=behind - tokens)  # of padded rows; a decomposed graph has what the mask has
        inputs |= cache_tensors("past", cache)
        outputs, new = {"logits": cache.new_empty(rows, len(keep), spec.vocab_size)}, None
        if spec.attention == "operator":
            outputs |= cache_tensors("present", cache)
        else:
            sizes = rows, spec.kv_heads, tokens, spec.head_dim
            size = torch.Size(sizes).numel()
            padded = cache.new_empty(spec.layers, 2, -(-size // ALIGNED) * ALIGNED)
            new = padded[..., :size].view(spec.layers, 2, *sizes)
            outputs |= cache_tensors("new", new)
        for name, tensor in inputs.items() if reshaped else ():
            shape = tuple(tensor.shape)
            accepted(context.set_input_shape(name, shape), f"shape of {name}", shape)
        for name, tensor in {**inputs, **outputs}.items():
            assert tensor.is_contiguous(), name
            address = tensor.data_ptr()
            accepted(context.set_tensor_address(name, address), f"address of {name}", hex(address))
        unknown = context.infer_shapes()
        accepted(not unknown, "inputs without a shape", unknown)
        accepted(context.execute_async_v3(self._stream()), "enqueue of", tuple(step.mask.shape))
        if new is not None:
            write_columns(cache, new, step.write_at.clamp(max=cache.shape[4] - tokens))
        return outputs["logits"]

    def _runtime_configs(self) -> tuple[Any, Any, Any]:
        """How TensorRT-RTX makes contexts, of prompts and of decoding, and its cache: their memory is ours.

        A shape's kernels are compiled before it decodes: a graph would keep those that run while others are compiled.
        Prompts, which have many shapes and no graphs, do not wait for theirs. TensorRT-RTX's own graphs are off: steps
        are captured here. What it compiled is kept for the next process.
        """
        configs = self._engine.create_runtime_config(), self._engine.create_runtime_config()
        kernels = configs[0].create_runtime_cache()
        path = cache_folder() / "tensorrt-rtx" / f"{self.spec.build_hash}.kernels"
        if path.is_file() and not kernels.deserialize(path.read_bytes()):
            log.info("kernels are compiled anew: those of %s are of another GPU, driver or version", path)
        strategies = self._trt.DynamicShapesKernelSpecializationStrategy
        for config, strategy in zip(configs, (strategies.LAZY, strategies.EAGER), strict=True):
            config.set_execution_context_allocation_strategy(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            config.dynamic_shapes_kernel_specialization_strategy = strategy
            config.cuda_graph_strategy = self._trt.CudaGraphStrategy.DISABLED
            accepted(config.set_runtime_cache(kernels), "cache of kernels", path)
        weakref.finalize(self, _write_kernels, kernels, path)
        return *configs, kernels

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


@cache
def _logger(trt: ModuleType) -> Any:
    """What goes to our log; one for the whole process, because TensorRT keeps the first one that it sees."""

    class Log(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            serious = severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)
            log.log(logging.ERROR if serious else logging.DEBUG, "TensorRT: %s", message)

    return Log()


def load_plan(trt: ModuleType, path: Path) -> tuple[Any, Any]:
    """The runtime, which has to outlive it, and the engine of a plan.

    Raises:
        InvalidInput: the runtime does not take it; it says why on its log.
    """
    runtime, engine = trt.Runtime(_logger(trt)), None
    if path.stat().st_size:  # of nothing there is no map; a plan that was read would take as much memory again
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as plan:
            engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise InvalidInput("plan", str(path), "the runtime cannot load it (see its log); export again")
    return runtime, engine


def prefill_chunks(step: Step, tokens: int) -> Iterator[tuple[Step, int, Tensor]]:
    """A step as steps of one row and at most `tokens` tokens, in an order in which each finds what it attends to.

    Yields:
        the chunk, its row in the step, and which of the step's kept positions it has, int64 [n].
    """
    for row in range(step.tokens.shape[0]):
        for start in range(0, step.tokens.shape[1], tokens):
            part = slice(start, start + tokens)
            kept = step.keep  # of a prompt, that keeps nothing, it is not looked at: that would wait for a device
            if len(kept):
                kept = ((step.keep >= start) & (step.keep < start + tokens)).nonzero()[:, 0]
            chunk = Step(
                tokens=step.tokens[row : row + 1, part],
                positions=step.positions[row : row + 1, part],
                write_at=step.write_at[row : row + 1] + start,
                mask=step.mask[row : row + 1, :, part],
                keep=step.keep[kept] - start,
                first_row=step.first_row + row,
            )
            yield chunk, row, kept


def accepted(answer: bool, what: str, value: object) -> None:
    """TensorRT refuses by returning False; its log says why."""
    if not answer:
        raise RuntimeError(f"TensorRT refused the {what} {value}")
