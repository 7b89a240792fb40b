"""ONNX Runtime engine: the exported graph with the cache bound in place."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from engines.base import Engine, EngineSpec, Step
from engines.binding import Binding, open_session
from engines.kv import write_columns

KEPT = 64
"""Bindings kept, of steps that come again in the same memory."""


class OnnxRuntimeEngine(Engine):
    """A step is one run on bound memory.

    `past_*` and `present_*` of a layer are bound to one address, so `TensorScatter` writes in place and nothing of the
    cache is ever copied; of a graph whose attention is decomposed, its new columns are. Runs on the CPU provider;
    `spec.dtype` float32 or float16.

    Args:
        folder: engine folder that holds `model.onnx`.
        spec: its specification.
        threads: intra-op threads.
        graph: the file in the folder that is run.
    """

    def __init__(self, folder: Path, spec: EngineSpec, threads: int, graph: str = "model.onnx") -> None:
        super().__init__(spec)
        self._session = open_session(folder / graph, threads)
        self._kept: OrderedDict[tuple[int, ...], Binding] = OrderedDict()
        self._returns_columns = spec.attention == "decomposed"

    def step(self, step: Step) -> Tensor:
        """See `Engine.step`."""
        logits = step.out
        if logits is None:
            shape = step.tokens.shape[0], step.keep.shape[0], self.spec.vocab_size
            logits = torch.empty(shape, dtype=self.spec.torch_dtype)
            binding = self._bound(step)
        else:
            binding = self._binding(step, logits)
        binding.input("tokens", step.tokens)
        binding.input("positions", step.positions)
        binding.input("mask", step.mask)
        binding.input("write_at", step.write_at)
        binding.input("keep", step.keep)
        binding.output("logits", logits)
        if self._returns_columns:
            self._run_and_write(binding, step)
        else:
            binding.run()
        return logits

    def _binding(self, step: Step, out: Tensor) -> Binding:
        """The binding of a step that comes again."""
        addresses = step.tokens.data_ptr(), step.mask.data_ptr(), out.data_ptr()
        key = (*addresses, *step.tokens.shape, step.mask.shape[3], step.keep.shape[0], step.first_row)
        binding = self._kept.get(key)
        if binding is None:
            binding = self._kept[key] = self._bound(step)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return binding

    def _run_and_write(self, binding: Binding, step: Step) -> None:
        """Run a graph that returns the new columns of the cache, and write them."""
        spec, (rows, steps) = self.spec, step.tokens.shape
        new = torch.empty(spec.layers, 2, rows, spec.kv_heads, steps, spec.head_dim, dtype=spec.torch_dtype)
        for kind, name in enumerate(("key", "value")):
            for layer in range(spec.layers):
                binding.output(f"new_{name}.{layer}", new[layer, kind])
        binding.run()
        write_columns(self.kv[:, :, step.first_row : step.first_row + rows], new, step.write_at)

    def _bound(self, step: Step) -> Binding:
        """A binding to the cache rows of a step."""
        binding = Binding(self._session)
        rows = slice(step.first_row, step.first_row + step.tokens.shape[0])
        for kind, name in enumerate(("key", "value")):
            for layer in range(self.spec.layers):
                view = self.kv[layer, kind, rows]
                binding.input(f"past_{name}.{layer}", view)
                if not self._returns_columns:
                    binding.output(f"present_{name}.{layer}", view)
        return binding
