"""Whether a graph has the sizes that its `engine.json` names."""

from __future__ import annotations

from pathlib import Path

import onnx

from engines.base import EngineSpec, input_shapes
from mtad.errors import InvalidInput


def check_graph(path: Path, spec: EngineSpec) -> None:
    """Compare the shapes of a graph's inputs and of its logits with what a description says.

    Raises:
        InvalidInput: they differ, so that memory for other sizes would be bound to the graph.
    """
    graph = onnx.load(path, load_external_data=False).graph
    values = [*graph.input, *(value for value in graph.output if value.name == "logits")]
    found = {v.name: tuple(dim.dim_param or dim.dim_value for dim in v.type.tensor_type.shape.dim) for v in values}
    wanted = input_shapes(spec, "rows", "steps", "length", "kept") | {"logits": ("rows", "kept", spec.vocab_size)}
    for name in sorted(found.keys() | wanted.keys()):
        if (there := found.get(name)) != (said := wanted.get(name)):
            problem = f"it says that the graph's {name} has the shape {said}, and it has {there}; export again"
            raise InvalidInput("engine.json", str(path.parent), problem)
