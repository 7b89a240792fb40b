"""Execution providers of ONNX Runtime: what a session of each is opened with, and whether it really runs there.

Left to itself ONNX Runtime falls back to the CPU wherever it can: a provider whose libraries are missing is left out
of the session, an operator without a kernel goes to the CPU. Here each of these is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnxruntime as ort
import torch

from engines.quiet import quiet
from mtad.errors import InvalidInput

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""ONNX Runtime's names of the providers."""

Options = list[tuple[str, dict[str, str]]]
"""Providers and their options, as `onnxruntime.InferenceSession` takes them."""


def check_cuda() -> None:
    """Whether the CUDA provider can be asked for here, before a session is opened.

    Raises:
        InvalidInput: an ONNX Runtime without it.
    """
    if PROVIDERS["cuda"] not in ort.get_available_providers():
        problem = f"the installed ONNX Runtime {ort.__version__} has no {PROVIDERS['cuda']}; install the extra cuda,"
        remedy = "remove the package onnxruntime, and install onnxruntime-gpu again: both have the same files"
        raise InvalidInput("provider", "cuda", f"{problem} {remedy}")
    with quiet():  # it prints
        ort.preload_dlls()  # torch's or NVIDIA's packages of CUDA and cuDNN, so that the provider's library finds them


def cuda_options(device: str, stream: int) -> Options:
    """What a session on a GPU is given; the options are described on ONNX Runtime's page of the CUDA provider.

    Args:
        stream: CUDA's handle of the stream that everything runs on.
    """
    options = {
        "device_id": str(torch.device(device).index or 0),
        "user_compute_stream": str(stream),
        "use_tf32": "0",  # float32 means float32, as in torch
    }
    return [(PROVIDERS["cuda"], options)]


def check_session(session: ort.InferenceSession, graph: Path) -> None:
    """Whether a session runs on the GPU that it was opened for; its options must record the assignment of nodes.

    ONNX Runtime computes shapes on the CPU whatever the provider. Integers and booleans are taken for shapes; what the
    layers compute is neither.

    Raises:
        InvalidInput: the CUDA provider was left out of it, or a node with another result, or one of a type that is not
            known, is on the CPU.
    """
    if PROVIDERS["cuda"] not in session.get_providers():
        needed = f"it needs CUDA {getattr(ort, 'cuda_version', '') or '?'} and cuDNN 9"
        remedy = f"(torch is built for CUDA {torch.version.cuda}); the extra cuda installs them"
        raise InvalidInput("provider", "cuda", f"ONNX Runtime could not load it (see its log): {needed} {remedy}")
    shapes = set(_shapes(onnx.shape_inference.infer_shapes(onnx.load(graph, load_external_data=False)).graph))
    left = Counter(
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == PROVIDERS["cpu"]
        for node in part.get_nodes()
        if node.name not in shapes
    )
    if left:
        found = ", ".join(f"{count} {name}" for name, count in sorted(left.items()))
        problem = f"ONNX Runtime {ort.__version__} leaves {found} on the CPU, for which it may have no CUDA kernel"
        remedy = "export with --attention decomposed, in another precision, or with --to torch"
        raise InvalidInput("provider", "cuda", f"{problem}; {remedy}")


def _shapes(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of nodes whose result is integers or booleans, in the bodies of loops as well."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    for node in graph.node:
        if types.get(node.output[0]) in (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL):
            yield node.name
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _shapes(attribute.g)
