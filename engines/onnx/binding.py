"""ONNX Runtime on bound memory: no tensor is copied or allocated, and an address is bound once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor

from engines.onnx.providers import Options

SPIN_MICROSECONDS = 200
"""How long a thread of a session's pool spins for its next piece of a step before it sleeps. Within a step the pieces
follow each other at once, and waking a thread costs as much as a piece; between steps the cores belong to the other
sessions."""

_TYPES = {torch.float32: 1, torch.float16: 10, torch.bfloat16: 16, torch.int64: 7, torch.bool: 9}
"""Numbers of the types in `onnx.TensorProto.DataType`; numpy has no bfloat16."""


def open_session(path: Path, threads: int, providers: Options | None, model: bytes | None) -> ort.InferenceSession:
    """A session that runs a graph.

    Args:
        providers: where it runs, see `engines.onnx.providers.cuda_options`; None: on the CPU. On a GPU weights
            lie outside the arena, and what runs where is noted for `engines.onnx.providers.check_session`.
        model: a serialized graph that is run in place of the one in the file `path`, with the weights beside that.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # one would be kept for each shape of inputs, and their blocks split the arena
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    # links out of its folder and, of a graph that is a link itself, out of the other: ONNX Runtime does not follow them
    folders = [path.parent.resolve(), *([path.resolve().parent] if model is None else [])]
    if linked := [file for file in sorted(path.parent.glob("*.data")) if file.resolve().parent not in folders]:
        maps = [np.memmap(file, np.uint8, "r") for file in linked]  # needed until the session is made
        names, sizes = [file.name for file in linked], [len(content) for content in maps]
        options.add_external_initializers_from_files_in_memory(names, maps, sizes)
    graph: str | bytes = str(path)
    if model is not None:
        graph = model
        folder = str(path.parent.absolute())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    if providers is None:
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)


class Binding:
    """One set of memory a session runs on.

    Keeps every tensor that it has bound, so that addresses stay valid, and binds a name again for another tensor only.
    """

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session, self._binding = session, session.io_binding()
        self._bound: dict[str, Tensor] = {}

    def input(self, name: str, tensor: Tensor) -> None:
        if self._bound.get(name) is not tensor:
            self._bind(self._binding.bind_input, name, tensor)

    def output(self, name: str, tensor: Tensor) -> None:
        """Write `name` to `tensor`, contiguous."""
        if self._bound.get(name) is not tensor:
            assert tensor.is_contiguous(), name
            self._bind(self._binding.bind_output, name, tensor)

    def forget(self, *names: str) -> None:
        """Let go of tensors of these names, which are bound anew before the next run."""
        for name in names:
            del self._bound[name]

    def run(self, options: ort.RunOptions | None = None) -> None:
        self._session.run_with_iobinding(self._binding, options)

    def _bind(self, bind: Callable[..., None], name: str, tensor: Tensor) -> None:
        kept = self._bound[name] = tensor.contiguous()  # a copy, made anew each time, unless it is contiguous
        # an empty tensor (a prefill keeps no logits) has no address, and the binding refuses a null one
        address = kept.data_ptr() or _NOT_NULL.ctypes.data
        bind(name, kept.device.type, kept.device.index or 0, _TYPES[kept.dtype], tuple(kept.shape), address)


_NOT_NULL = np.zeros(1)
