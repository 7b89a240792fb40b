"""Graphs of models without weights, traced once in a process: tracing is a function of shapes and configuration."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.onnx._internal.exporter._registration import ONNXRegistry
from transformers import PreTrainedModel

from engines.base import EngineSpec
from engines.kinds import FORMATS

Traced = tuple[ir.Model, dict[str, torch.dtype]]
Trace = Callable[[PreTrainedModel, EngineSpec], Traced]


OPERATORS = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
"""What torch's exporter reads of all its operators for every graph, read once: a fifth of the time."""


def remembered(
    trace: Callable[[PreTrainedModel, EngineSpec], Traced],
) -> Callable[[PreTrainedModel, EngineSpec], Traced]:
    """Return `export.onnx.graph.trace_graph` with a memory of the models that have no weights."""
    known: dict[str, Traced] = {}

    def traced(model: PreTrainedModel, spec: EngineSpec) -> Traced:
        if not all(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            return trace(model, spec)
        key = _key(model, spec)
        if key not in known:
            known[key] = trace(model, spec)
        graph, parameters = known[key]
        return graph.clone(), dict(parameters)

    return traced


def _key(model: PreTrainedModel, spec: EngineSpec) -> str:
    """Everything of a model and a specification that a graph can depend on."""
    config: Any = model.config.to_dict()
    config.pop("_name_or_path", None)
    content = hashlib.sha256()
    parameters = [(name, each.shape, each.dtype) for name, each in model.named_parameters(remove_duplicate=False)]
    shape = (spec.layers, spec.kv_heads, spec.head_dim, spec.vocab_size, spec.capacity, spec.dtype)
    form = spec.attention, FORMATS[spec.format].stored == "plan"
    content.update(repr((type(model), sorted(config.items()), parameters, shape, form)).encode())
    for name, buffer in model.named_buffers():
        content.update(name.encode() + buffer.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
