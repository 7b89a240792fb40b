"""ONNX Runtime engine: the exported graph with the cache bound in place, on the CPU or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime as ort
import torch
from torch import Tensor

from engines.base import INPUTS, Engine, EngineSpec, Step, cache_tensors
from engines.buffers import Arena, LruCache
from engines.cache.columns import ColumnCache, write_columns
from engines.capture import ordered
from engines.onnx.binding import Binding, open_session
from engines.onnx.providers import check_cuda, check_session, cuda_options
from engines.placement import ONE_CORE, Placement
from mtad.errors import refused_as

MAX_BINDINGS = 256
"""Bindings kept, one for each part of the cache and memory for logits. Prompts, whose logits are new memory each time,
share one per part; a step that comes again is bound but for what differs by then."""


def open_onnxruntime(folder: Path, spec: EngineSpec, placement: Placement = ONE_CORE) -> OnnxRuntimeEngine:
    """Open `model.onnx` where it is to run. On a GPU: not executed.

    Raises:
        InvalidInput: it cannot run there, or not all of it could; nothing falls back to the CPU.
    """
    if not placement.on_gpu:
        return OnnxRuntimeEngine(folder, spec, placement.threads, packed=spec.attention == "operator")
    check_cuda()
    stream = torch.cuda.Stream(placement.device)  # type: ignore[no-untyped-call]
    with refused_as("provider", "cuda", "ONNX Runtime cannot open the graph with it"):
        return OnnxRuntimeEngine(folder, spec, placement.threads, stream=stream)


class OnnxRuntimeEngine(Engine):
    """A step is one run on bound memory.

    `past_*` and `present_*` of a layer are bound to one address, so `TensorScatter` writes in place. A graph whose
    attention is decomposed returns new columns, which are copied.

    On a GPU a step runs on the session's own stream, behind what the caller's stream was given before, and the host
    does not wait for it. Its logits are new memory on the device of the step's tokens.

    Args:
        graph: the file in the folder that is run.
        packed: whether rows are as close together as the longest of them allows (`ColumnCache`).
        stream: the stream of a GPU that the session runs on, refused unless all of the graph does; default: the CPU.
    """

    cache: ColumnCache

    def __init__(
        self,
        folder: Path,
        spec: EngineSpec,
        threads: int,
        graph: str = "model.onnx",
        packed: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        device, options = "cpu", None
        if stream is not None:
            device, options = str(stream.device), cuda_options(str(stream.device), stream.cuda_stream)
        model = without_slices(folder / graph) if packed else None
        self._session = open_session(folder / graph, threads, options, model)
        if stream is not None:
            check_session(self._session, folder / graph)
        super().__init__(spec, ColumnCache(spec, device, packed))
        self._packed, self._mask, self._new = packed, Arena(), Arena(device)  # steps do not overlap
        self._bindings: LruCache[tuple[int, ...], Binding] = LruCache(MAX_BINDINGS)
        self._returns_columns = spec.attention == "decomposed"
        self._stream, self._run_options = stream, ort.RunOptions()
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")  # the host does not wait

    @property
    def name(self) -> str:
        return f"ONNX Runtime {ort.__version__}, {'cpu' if self.device.type == 'cpu' else 'cuda'}"

    def step(self, step: Step) -> Tensor:
        if self._stream is not None:
            return self._on_gpu(step, self._stream).to(step.tokens.device)
        return self._on_packed(step) if self._packed else self._on_host(step, self.cache.kv, step.first_row)

    def _on_packed(self, step: Step) -> Tensor:
        """Run a step on rows of a packed cache; its mask has as many columns as they have."""
        copy = self.cache.prepare(step)
        cache, first_row = (self.cache.kv, step.first_row) if copy is None else (copy, 0)
        length, columns = step.mask.shape[3], cache.shape[4]
        if length != columns:
            mask = self._mask.view_like(torch.empty(*step.mask.shape[:3], columns, dtype=torch.bool, device="meta"))
            mask[..., :length], mask[..., length:] = step.mask, False
            step = replace(step, mask=mask)
        logits = self._on_host(step, cache, first_row)
        if copy is not None:
            self.cache.write_back(step, copy)
        return logits

    def _on_host(self, step: Step, cache: Tensor, first_row: int) -> Tensor:
        """Run a step on the rows of a cache from `first_row` on."""
        logits, rows = step.out, len(step.tokens)
        key = id(logits), rows, first_row, cache.data_ptr(), cache.shape[4]
        binding = self._bindings.find(key, lambda: self._bind_cache(cache[:, :, first_row : first_row + rows]))
        if logits is None:
            logits = torch.empty(rows, len(step.keep), self.spec.vocab_size, dtype=self.spec.torch_dtype)
        self._run(step, logits, binding)
        if step.out is None:
            binding.forget("logits", *INPUTS)
        return logits

    def _on_gpu(self, step: Step, stream: torch.cuda.Stream) -> Tensor:
        device, kept = self.device, len(step.keep)
        with ordered(stream):
            placed = replace(step, **{name: getattr(step, name).to(device, non_blocking=True) for name in INPUTS})
            if not kept:  # whether each kernel takes an empty tensor was not tried
                placed = replace(placed, keep=torch.zeros(1, dtype=torch.int64, device=device))
            shape = placed.tokens.shape[0], len(placed.keep), self.spec.vocab_size
            logits = torch.empty(shape, dtype=self.spec.torch_dtype, device=device)
            self._run(placed, logits, self._bind_cache(self.cache.of(placed)), self._run_options)
        return logits[:, :kept]

    def _bind_cache(self, cache: Tensor) -> Binding:
        binding = Binding(self._session)
        for name, part in cache_tensors("past", cache).items():
            binding.input(name, part)
        if not self._returns_columns:
            for name, part in cache_tensors("present", cache).items():
                binding.output(name, part)
        return binding

    def _run(self, step: Step, logits: Tensor, binding: Binding, options: ort.RunOptions | None = None) -> None:
        for name in INPUTS:
            binding.input(name, getattr(step, name))
        binding.output("logits", logits)
        new = None
        if self._returns_columns:
            spec, (rows, steps) = self.spec, step.tokens.shape
            shape = spec.layers, 2, rows, spec.kv_heads, steps, spec.head_dim
            new = self._new.view_like(torch.empty(shape, dtype=spec.torch_dtype, device="meta"))
            for name, part in cache_tensors("new", new).items():
                binding.output(name, part)
        binding.run(options)
        if new is not None:
            write_columns(self.cache.of(step), new, step.write_at)


def without_slices(path: Path) -> bytes:
    """An exported graph that attends to all columns it is given, and takes rows of any number of columns."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    cache = {value.name for value in graph.output if value.name.startswith("present_")}
    slices = [node for node in graph.node if node.op_type == "Slice" and node.input[0] in cache]
    sliced = {node.output[0]: node.input[0] for node in slices}
    nodes = [node for node in graph.node if node.output[0] not in sliced]
    for node in nodes:
        node.input[:] = [sliced.get(name, name) for name in node.input]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in [*graph.input, *graph.output]:
        if value.name.startswith(("past_", "present_")):
            value.type.tensor_type.shape.dim[2].dim_param = "columns"
    return bytes(model.SerializeToString())
