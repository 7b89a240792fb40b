"""ONNX Runtime engine: the exported graph with the cache bound in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from engines.base import Engine, EngineSpec, Step

_NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64, torch.bool: np.bool_}


class OnnxRuntimeEngine(Engine):
    """A step is one `run_with_iobinding`.

    `past_*` and `present_*` of a layer are bound to one address, so `TensorScatter` writes in place and nothing of the
    cache is ever copied. Runs on the CPU provider; `spec.dtype` float32 or float16.

    Args:
        folder: engine folder that holds `model.onnx`.
        spec: its specification.
        threads: intra-op threads.
    """

    def __init__(self, folder: Path, spec: EngineSpec, threads: int) -> None:
        super().__init__(spec)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # two sessions share the cores: a spinning thread of one takes time from the other
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        self._bound: tuple[int, int] | None = None

    def step(self, step: Step) -> Tensor:
        """See `Engine.step`."""
        rows = step.tokens.shape[0]
        if self._bound != (step.first_row, rows):
            self._bind_cache(step.first_row, rows)
        logits = torch.empty(rows, step.keep.shape[0], self.spec.vocab_size, dtype=self.spec.torch_dtype)
        inputs = {
            "tokens": step.tokens.contiguous(),
            "positions": step.positions.contiguous(),
            "mask": step.mask.contiguous(),
            "write_at": step.write_at.contiguous(),
            "keep": step.keep.contiguous(),
        }
        for name, tensor in inputs.items():
            self._bind(self._binding.bind_input, name, tensor)
        self._bind(self._binding.bind_output, "logits", logits)
        self._session.run_with_iobinding(self._binding)
        return logits

    def _bind_cache(self, first_row: int, rows: int) -> None:
        for kind, name in enumerate(("key", "value")):
            for layer in range(self.spec.layers):
                view = self.kv[layer, kind, first_row : first_row + rows]
                self._bind(self._binding.bind_input, f"past_{name}.{layer}", view)
                self._bind(self._binding.bind_output, f"present_{name}.{layer}", view)
        self._bound = first_row, rows

    def _bind(self, bind: Callable[..., None], name: str, tensor: Tensor) -> None:
        # an empty tensor (a prefill keeps no logits) has no address, and the binding refuses a null one
        address = tensor.data_ptr() or self.kv.data_ptr()
        bind(name, "cpu", 0, _NUMPY[tensor.dtype], tuple(tensor.shape), address)
