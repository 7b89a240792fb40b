"""A stand-in for a TensorRT runtime: its calls and their rules are TensorRT's, the arithmetic is ONNX Runtime's.

A "plan" names an ONNX graph and optimization profiles; an enqueue runs the graph on the addresses that were bound, so
that a wrong shape, address, profile or alias gives wrong logits, or is refused as TensorRT refuses. Signatures are
those of `tensorrt_rtx`, which a test compares.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from engines.base import EngineSpec
from engines.onnx.binding import open_session
from engines.tensorrt_plan import TensorRtPlan
from export.tensorrt import profile_shapes

__version__ = "1.7.1.116"

_NUMPY = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}


_LAUNCHED: list[Callable[[], None]] = []
_OPERATORS: Any = torch.library.Library("fake_tensorrt", "DEF")  # type: ignore[no-untyped-call]
_OPERATORS.define("launch(Tensor(a!) memory, int number) -> ()")
_OPERATORS.impl("launch", lambda memory, number: _LAUNCHED[number](), "CPU")
"""An enqueue is an operator of torch, so that recorders see it; a replay takes the shapes and addresses it had."""


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1


class CudaGraphStrategy(enum.Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


def write_plan(path: Path, graph: Path, spec: EngineSpec, plan: TensorRtPlan) -> None:
    """Write what `Runtime` here deserialises, with the profiles that the builder would be given."""
    path.write_text(json.dumps({"graph": str(graph), "profiles": profile_shapes(spec, plan)}))


class IRuntimeCache:
    def __init__(self) -> None:
        self.blob = b""

    def deserialize(self, blob: bytes) -> bool:
        self.blob = blob
        return blob.startswith(b"kernels")

    def serialize(self) -> bytes:
        return self.blob or b"kernels"


class IRuntimeConfig:
    def __init__(self) -> None:
        self.cache: IRuntimeCache | None = None
        self.strategy = ExecutionContextAllocationStrategy.STATIC
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self.cuda_graph_strategy = CudaGraphStrategy.WHOLE_GRAPH_CAPTURE

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache | None = None) -> bool:
        self.cache = cache
        return True


class IExecutionContext:
    """Refuses, by returning False, what TensorRT refuses."""

    def __init__(self, session: ort.InferenceSession, profiles: Sequence[Mapping[str, Any]]) -> None:
        self._session, self._profiles = session, profiles
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory = 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        return profile_index in range(len(self._profiles))

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = size if memory else 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self._profile is None or name not in self._profiles[self._profile]:
            return False
        least, _, largest = self._profiles[self._profile][name]
        self._shapes[name] = shape
        return len(shape) == len(least) and all(a <= b <= c for a, b, c in zip(least, shape, largest, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return name in {tensor.name for tensor in (*self._session.get_inputs(), *self._session.get_outputs())}

    def infer_shapes(self) -> list[str]:
        return [tensor.name for tensor in self._session.get_inputs() if tensor.name not in self._shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        if not self._memory or self.infer_shapes():
            return False
        binding, (rows, steps) = self._session.io_binding(), self._shapes["tokens"]
        for tensor in self._session.get_inputs():
            shape, address = self._shapes[tensor.name], self._addresses[tensor.name]
            binding.bind_input(tensor.name, "cpu", 0, _NUMPY[tensor.type], shape, address)
        sizes = {"rows": rows, "steps": steps, "kept": self._shapes["keep"][0]}
        for tensor in self._session.get_outputs():
            address = self._addresses[tensor.name]
            if tensor.name.startswith("present") and address != self._addresses[tensor.name.replace("present", "past")]:
                return False
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in tensor.shape)
            binding.bind_output(tensor.name, "cpu", 0, _NUMPY[tensor.type], shape, address)
        session = self._session
        _LAUNCHED.append(lambda: session.run_with_iobinding(binding))
        torch.ops.fake_tensorrt.launch(torch.empty(0), len(_LAUNCHED) - 1)
        return True


class ICudaEngine:
    """Contexts take their memory from the caller.

    Attributes:
        contexts: those made, in order.
        specializations: how each compiles kernels for a new shape, of TensorRT-RTX.
    """

    def __init__(self, graph: Path, profiles: Sequence[Mapping[str, Any]]) -> None:
        self._session, self._profiles = open_session(graph, 1, None, None), profiles
        self.contexts: list[IExecutionContext] = []
        self.specializations: list[DynamicShapesKernelSpecializationStrategy] = []

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return 256 * (1 + profile_index)

    def get_aliased_input_tensor(self, name: str) -> str:
        return name.replace("present", "past") if name.startswith("present") else ""

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, strategy: Any) -> IExecutionContext | None:
        if isinstance(strategy, IRuntimeConfig):
            self.specializations.append(strategy.dynamic_shapes_kernel_specialization_strategy)
            assert strategy.cuda_graph_strategy.name == "DISABLED"
            strategy = strategy.strategy
        if strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            return None
        self.contexts.append(IExecutionContext(self._session, self._profiles))
        return self.contexts[-1]


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: mmap) -> ICudaEngine | None:
        try:
            values = json.loads(serialized_engine.read())
            return ICudaEngine(Path(values["graph"]), values["profiles"])
        except ValueError:
            return None
