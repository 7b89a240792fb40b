"""OpenVINO engine: the exported ONNX graph on a CPU, with a paged cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.base import Engine, EngineSpec, Step
from engines.kinds import QUANTIZED
from engines.openvino.cache import Array, OpenVinoCache
from engines.openvino.graph import PAGE, computes_bfloat16, load_openvino, read_graph, transpose_weights
from engines.openvino.run import Run
from engines.placement import Placement, cores
from mtad.errors import InvalidInput

COMPUTE = {"float32": "f32", "bfloat16": "bf16"}
"""OpenVINO's names of the types that it computes in."""

SMT = Path("/sys/devices/system/cpu/smt/active")
"""Linux says there whether a core runs two threads: OpenVINO takes one of them (`cpu_map_scheduling.cpp`)."""


class OpenVinoEngine(Engine):
    """A step is one run over the new tokens of all rows, without padding.

    Chunks of prompts, which keep no logits, are computed by the next run, beside the tokens of its own step. Logits
    agree with ONNX Runtime's up to rounding, and a row's depend in their last bits on the other rows.

    Args:
        placement: its `compute` is by default bfloat16 where the CPU has it, but float32 with quantized weights, whose
            products OpenVINO computes in 8 bits only then (`dnnl_fullyconnected_primitive.cpp`).

    Raises:
        InvalidInput: OpenVINO is not installed or cannot run the graph, or the CPU has no such type.
    """

    cache: OpenVinoCache

    def __init__(self, folder: Path, spec: EngineSpec, placement: Placement) -> None:
        self.spec = spec
        self._ov = load_openvino()
        has_bfloat16 = computes_bfloat16()
        compute = placement.compute or ("bfloat16" if has_bfloat16 and spec.precision not in QUANTIZED else "float32")
        kv_cache = placement.kv_cache or compute
        for name, value, known in (("compute", compute, list(COMPUTE)), ("kv_cache", kv_cache, [compute, "u8"])):
            if value not in known:
                raise InvalidInput(name, value, f"give one of {', '.join(known)}")
        if compute == "bfloat16" and not has_bfloat16:
            raise InvalidInput("compute", compute, "this CPU has no instructions for it (AVX512-BF16); give float32")
        options = {
            "INFERENCE_PRECISION_HINT": COMPUTE[compute],
            "KV_CACHE_PRECISION": COMPUTE.get(kv_cache, kv_cache),
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": placement.threads,
            "ENABLE_CPU_PINNING": placement.threads >= (os.cpu_count() or 1),  # every process would take the first
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128,  # activations share a scale as weights do; by default, only 32 do
        }
        self._types = f"{compute}{f', cache {kv_cache}' if kv_cache != compute else ''}"
        model = read_graph(folder / "model.onnx", spec)
        used = cores() // 2 if SMT.exists() and SMT.read_text().strip() == "1" else cores()
        if min(placement.threads, used) > 1 and compute == "bfloat16":
            transpose_weights(model)
        compiled = self._ov.Core().compile_model(model, "CPU", options)
        self._request = compiled.create_infer_request()
        ports = [port for port in compiled.inputs if "_cache." in port.any_name]
        for port in ports[1::2]:  # of values; quantized keys have rows for scales and zero points besides
            if port.partial_shape[2].get_length() != PAGE:
                problem = f"pages of {port.partial_shape[2]} columns, not {PAGE}: another version; give cpu"
                raise InvalidInput("provider", "openvino", problem)
        self.cache = OpenVinoCache(spec, ports, partial(_bind, self._request, ports))  # holds no engine that holds it
        self._feeds: dict[str, Array] = {}
        self._logits: Tensor | None = None

    @property
    def name(self) -> str:
        return f"OpenVINO {self._ov.__version__.split('-')[0]}, {self._types}"

    def step(self, step: Step) -> Tensor:
        given = step.tokens, step.positions, step.write_at, step.mask
        tokens, positions, write_at, mask = (tensor.numpy() for tensor in given)
        shape = len(tokens), len(step.keep), self.spec.vocab_size
        if not shape[1] and self._is_deferred(positions, write_at, mask, step.first_row):
            for row, (own, at, start) in enumerate(zip(tokens, positions, write_at, strict=True), step.first_row):
                self.cache.copy_pages(self.cache.columns.defer(own, at, int(start), row))
            return torch.empty(shape, dtype=self.spec.torch_dtype)
        run = self.cache.columns.plan(tokens, positions, write_at, mask[:, 0], step.keep.numpy(), step.first_row)
        logits = torch.empty(shape, dtype=self.spec.torch_dtype) if step.out is None else step.out
        self._infer(run, logits)
        return logits

    def _is_deferred(self, positions: Array, write_at: Array, mask: Array, first_row: int) -> bool:
        """Whether a step without logits is a chunk of prompts, which the next run computes beside its own tokens.

        A deferred row has had no run since its last chunk, so no other row decodes: that chunk is run now.
        """
        rows = range(first_row, first_row + len(write_at))
        if not self.cache.columns.deferred.isdisjoint(rows):
            self.run_deferred()
        columns = np.arange(mask.shape[3])
        at = write_at[:, None] + np.arange(positions.shape[1])
        causal = np.array_equal(mask[:, 0], columns <= at[:, :, None])
        return causal and all(map(self.cache.columns.follows, rows, write_at.tolist()))

    @property
    def deferred_rows(self) -> int:
        return len(self.cache.columns.deferred)

    def run_deferred(self) -> None:
        if self.cache.columns.deferred:
            run = self.cache.columns.plan_deferred()
            self._infer(run, torch.empty(1, 0, self.spec.vocab_size, dtype=self.spec.torch_dtype))

    def _infer(self, run: Run, logits: Tensor) -> None:
        """Run, writing the kept logits to `logits`, [.., V] of one for each."""
        try:
            self.cache.grow()
            self.cache.copy_pages(run.copies)
            for name, value in run.feeds.items():
                array = self._feeds.get(name)
                if array is None or array.shape != value.shape:  # else it takes the memory that OpenVINO knows
                    array = np.empty_like(value)
                    self._request.set_tensor(name, self._ov.Tensor(array, shared_memory=True))
                    self._feeds[name] = array
                array[...] = value
            if logits is not self._logits:
                flat = logits.view(1, -1, logits.shape[-1]).numpy()
                self._request.set_tensor("logits", self._ov.Tensor(flat, shared_memory=True))
                self._logits = logits
            self._request.infer()
        except BaseException:
            self.cache.columns.take_back(run)
            raise
        self.cache.run_late()


def _bind(request: Any, ports: Sequence[Any], number: int, raw: Array) -> None:
    """Let the steps of a request use pages, uint8 [pages, bytes of one], as the graph's cache `number`."""
    ov, port = load_openvino(), ports[number]
    shape = [len(raw), *(dim.get_length() for dim in list(port.partial_shape)[1:])]
    kind = port.element_type.to_dtype() if port.element_type != ov.Type.bf16 else np.uint16
    request.set_tensor(port.any_name, ov.Tensor(raw.view(kind).reshape(shape), ov.Shape(shape), port.element_type))
