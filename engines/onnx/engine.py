"""ONNX Runtime engine: the exported graph with the cache bound in place, on the CPU or on a GPU."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.base import INPUTS, Engine, EngineSpec, Step, named, write_columns
from engines.buffers import Recent
from engines.graphs.capture import CudaRecorder, Recorder, Work
from engines.graphs.runner import GraphRunner, StaticMemory, StepShape, handed_over
from engines.onnx.binding import Binding, open_session
from engines.onnx.providers import (
    Options,
    check_provider,
    check_session,
    choose_provider,
    cuda_options,
    load_onnxruntime,
)
from engines.placement import ONE_CORE, Placement
from mtad.errors import refused_as

if TYPE_CHECKING:
    import onnxruntime as ort

KEPT = 64
"""Bindings kept, of steps that come again in the same memory."""

RECORDED_TOKENS = 65
"""Tokens per row of the widest step that is recorded: a tree of 64 nodes and its root. Wider ones are prompts."""

UNRECORDED = -1
"""The graph id of a run that is neither recorded nor replayed."""


def open_onnxruntime(folder: Path, spec: EngineSpec, placement: Placement = ONE_CORE) -> OnnxRuntimeEngine:
    """Open `model.onnx` where it is to run. On a GPU: not executed.

    Args:
        placement: where it runs; the provider is `cuda` by default on a GPU, else `cpu`.

    Raises:
        InvalidInput: it cannot run there, or not all of it could; nothing falls back to the CPU.
    """
    threads, device, graphs = placement.threads, placement.device, placement.graphs
    provider = choose_provider(placement.provider, device)
    check_provider(provider)
    if provider == "cpu":
        from engines.onnx.packed_engine import PackedEngine

        return (OnnxRuntimeEngine if spec.attention == "decomposed" else PackedEngine)(folder, spec, threads)
    recorder = SessionRecorder(device)
    options = cuda_options(device, recorder.stream, graphs)
    with refused_as("provider", provider, "ONNX Runtime cannot open the graph with it"):
        return OnnxRuntimeEngine(
            folder, spec, threads, device=device, options=options, recorder=recorder, graphs=graphs
        )


class SessionRecorder(CudaRecorder):
    """The stream of a session that records its runs itself: the first with a new graph id, on this stream.

    Not executed: needs a GPU. ONNX Runtime keeps a session's graphs for each thread that runs it, so that steps that
    are to be replayed come from the thread that recorded them; another one records them once more. While it records,
    no thread may allocate GPU memory.
    """

    @property
    def stream(self) -> int:
        """CUDA's handle of it."""
        return int(self._stream.cuda_stream)

    def record(self, work: Work) -> Work:
        """Run the work, which records itself; it is what launches the recording as well."""
        work()
        return work


class OnnxRuntimeEngine(Engine):
    """A step is one run on bound memory.

    `past_*` and `present_*` of a layer are bound to one address, so `TensorScatter` writes in place. Of a graph whose
    attention is decomposed, the new columns are copied.

    On a GPU everything runs on the recorder's stream, behind what the caller's was given before, and the host waits for
    nothing. Steps that begin with row 0 and keep logits are replayed as CUDA graphs, each with a graph id and a
    binding of its own in static memory; other steps, such as prompts, run unrecorded on the memory they come in.
    Their logits lie where `engines.graphs.runner.handed_over` says.

    Args:
        graph: the file in the folder that is run.
        model: the graph that is run in place of that file's, serialized, with the same weights.
        device, options, recorder: where it runs (`open_onnxruntime`); default: on the CPU.

    Attributes:
        graphs: their owner; None if no steps are recorded.

    Raises:
        InvalidInput: the GPU does not run all of the graph.
    """

    capturable = False
    """A step cannot be part of another CUDA graph."""

    def __init__(
        self,
        folder: Path,
        spec: EngineSpec,
        threads: int,
        graph: str = "model.onnx",
        device: str = "cpu",
        options: Options | None = None,
        recorder: Recorder | None = None,
        graphs: bool = False,
        model: bytes | None = None,
    ) -> None:
        self._session = open_session(folder / graph, threads, providers=options, model=model)
        if options is not None:
            check_session(self._session)
        super().__init__(spec, device)
        self._kept: Recent[tuple[int, ...], Binding] = Recent(KEPT)
        self._returns_columns = spec.attention == "decomposed"
        self._recorder, self._ids, self._unrecorded = recorder, itertools.count(1), _run_options(UNRECORDED)
        self.graphs: GraphRunner | None = None
        self._new: Tensor | None = None  # new columns of all graphs, whose steps do not overlap
        if graphs:
            assert recorder is not None
            limit = StepShape(spec.rows, RECORDED_TOKENS, spec.capacity, RECORDED_TOKENS)
            memory = StaticMemory([limit], spec.vocab_size, spec.torch_dtype, device)
            self.graphs = GraphRunner(self._recordable, memory, recorder, spec.capacity)
            if self._returns_columns:
                self._new = self._columns(spec.rows, RECORDED_TOKENS).flatten()

    @property
    def name(self) -> str:
        return f"ONNX Runtime {load_onnxruntime().__version__}, {'cpu' if self.device.type == 'cpu' else 'cuda'}"

    def step(self, step: Step) -> Tensor:
        if self._recorder is None:
            return self._on_host(step)
        tokens, kept = step.tokens.shape[1], len(step.keep)
        if self.graphs and step.first_row == 0 and kept and tokens <= RECORDED_TOKENS:
            return handed_over(self.graphs.replay(step), step)
        return handed_over(self._once(step, self._recorder), step)

    def _on_host(self, step: Step) -> Tensor:
        logits = step.out
        if logits is None:
            shape = step.tokens.shape[0], step.keep.shape[0], self.spec.vocab_size
            logits = torch.empty(shape, dtype=self.spec.torch_dtype)
            binding = self._bound(step)
        else:  # it comes again
            addresses = step.tokens.data_ptr(), step.mask.data_ptr(), logits.data_ptr()
            sizes = *step.tokens.shape, step.mask.shape[3], step.keep.shape[0], step.first_row
            key = (*addresses, *sizes, self.kv.data_ptr(), self.kv.shape[4])
            binding = self._kept.find(key, lambda: self._bound(step))
        self._work(step, logits, binding)()
        return logits

    def _recordable(self, static: Step) -> Work:
        """The work of a step whose memory stays: its first run records it under an id of its own."""
        assert static.out is not None
        binding, number = self._bound(static), next(self._ids)
        weakref.finalize(binding, self._session.release_captured_graph, number).atexit = False
        return self._work(static, static.out, binding, _run_options(number), self._new)

    def _once(self, step: Step, recorder: Recorder) -> Tensor:
        """Run a step unrecorded; logits [R, N, V] on the engine's device."""
        device, kept = self.kv.device, len(step.keep)
        with recorder.ordered():
            placed = replace(step, **{name: getattr(step, name).to(device, non_blocking=True) for name in INPUTS})
            if not kept:  # whether each kernel takes an empty tensor was not tried
                placed = replace(placed, keep=torch.zeros(1, dtype=torch.int64, device=device))
            shape = placed.tokens.shape[0], len(placed.keep), self.spec.vocab_size
            logits = torch.empty(shape, dtype=self.spec.torch_dtype, device=device)
            self._work(placed, logits, self._bound(placed), self._unrecorded)()
        return logits[:, :kept]

    def _bound(self, step: Step) -> Binding:
        binding, cache = Binding(self._session), self._rows(step)
        for name, part in named("past", cache).items():
            binding.input(name, part)
        if not self._returns_columns:
            for name, part in named("present", cache).items():
                binding.output(name, part)
        return binding

    def _work(
        self,
        step: Step,
        logits: Tensor,
        binding: Binding,
        options: ort.RunOptions | None = None,
        memory: Tensor | None = None,
    ) -> Work:
        """What runs a step; a graph that returns new columns puts them into `memory`, or into new memory."""
        for name in INPUTS:
            binding.input(name, getattr(step, name))
        binding.output("logits", logits)
        rows, steps = step.tokens.shape
        new = self._columns(rows, steps, memory) if self._returns_columns else None
        if new is not None:
            for name, part in named("new", new).items():
                binding.output(name, part)

        def work() -> None:
            binding.run(options)
            if new is not None:
                write_columns(self._rows(step), new, step.write_at)

        return work

    def _columns(self, rows: int, steps: int, memory: Tensor | None = None) -> Tensor:
        """Columns of the cache, [layers, 2, R, kv_heads, S, head_dim]."""
        spec = self.spec
        shape = spec.layers, 2, rows, spec.kv_heads, steps, spec.head_dim
        if memory is None:
            return torch.empty(shape, dtype=spec.torch_dtype, device=self.kv.device)
        return memory[: torch.Size(shape).numel()].view(shape)

    def _rows(self, step: Step) -> Tensor:
        return self.kv[:, :, step.first_row : step.first_row + step.tokens.shape[0]]


def _run_options(graph: int) -> ort.RunOptions:
    """Options of runs that belong to a graph id; the host does not wait for them."""
    options: ort.RunOptions = load_onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options
