"""What each module of a model gives on a case: run by the checkpoint, by a torch engine, or read out of an ONNX graph.

All three are named by the module's path in the checkpoint (`model.layers.1.mlp.up_proj`): torch's exporter writes into
every node which module it came from, so a tensor of a graph can be compared with what the checkpoint's own module
returns. Only modules without children count, which is where the weights are.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from engines.base import INPUTS, Engine, named
from engines.pytorch.engine import TorchEngine
from export.onnx.graph import SCOPES
from export.verification.verify import Case, begin, compared, run_checkpoint, run_engine
from mtad.errors import InvalidInput


@dataclass(frozen=True)
class GraphLocation:
    """Where an output is written in an ONNX graph."""

    tensor: str
    node: str
    operator: str


def graph_locations(graph: onnx.GraphProto) -> dict[str, GraphLocation]:
    """The last tensor of each module without children, by its path, in the order of the nodes; and `logits`."""
    found: dict[str, GraphLocation] = {}
    for node in graph.node:
        place = GraphLocation(node.output[0], node.name, node.op_type)
        scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
        modules = ast.literal_eval(scopes)[:-1]  # the last one is the node
        path = modules[-1].removeprefix("model").removeprefix(".") if modules else ""  # `StepModel.model`
        for name in (path, "logits" if "logits" in node.output else ""):
            found.pop(name, None)
            found[name] = place
    parents = {name[:end] for name in found for end, letter in enumerate(name) if letter == "."}
    return {name: place for name, place in found.items() if name and name not in parents}


def checkpoint_layers(
    model: PreTrainedModel, case: Case, each: Callable[[list[int]], None] = lambda lengths: None
) -> dict[str, Tensor]:
    """What every module gives, [K, H] each, and `logits` [K, V], float32, of a checkpoint run by `run_checkpoint`."""
    passes: list[dict[str, Tensor]] = []
    with _recording(model) as recorded:

        def keep(lengths: list[int]) -> None:
            rows, last = torch.arange(len(lengths)), torch.tensor(lengths) - 1
            found = {name: _by_token(out, len(lengths), max(lengths)) for name, out in recorded.items()}
            passes.append({name: values[rows, last].float() for name, values in found.items() if values is not None})
            each(lengths)

        logits = run_checkpoint(model, case, keep)
    names = [name for name in passes[0] if all(name in one for one in passes)]
    return {**{name: torch.cat([one[name] for one in passes]) for name in names}, "logits": logits}


def torch_layers(engine: TorchEngine, case: Case) -> dict[str, Tensor]:
    """The same of a torch engine, with its cache and masks; the cache is overwritten."""
    step = begin(engine, case)
    with _recording(engine.model.model) as recorded:
        logits = engine.step(step)
        found = {name: _by_token(out, *step.tokens.shape) for name, out in recorded.items()}
    layers = {name: compared(case, values) for name, values in found.items() if values is not None}
    return {**layers, "logits": compared(case, logits.flip(1))}


class MarkedGraph:
    """An ONNX engine's graph with the last tensor of every module as an output.

    Nothing is fused across such a tensor, so its last bits may be others than the engine's; the logits are its own.

    Args:
        folder: engine folder of a format that keeps `model.onnx`.

    Raises:
        InvalidInput: the graph does not say which modules its nodes came from.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        self.places = graph_locations(model.graph)
        if len(self.places) < 2:
            raise InvalidInput("layers", str(folder), "its graph does not record the modules of its nodes")
        outputs = {value.name for value in model.graph.output}
        tensors = {place.tensor for place in self.places.values()}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors - outputs)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        # the weights stay where they are, and may be larger than what one protobuf message holds
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.absolute()))
        self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def layers(self, engine: Engine, case: Case) -> dict[str, Tensor]:
        """What every module gives, [K, H] each, and `logits` [K, V], float32; `engine` stores the contexts."""
        logits, step = run_engine(engine, case), begin(engine, case)
        rows = engine.kv[:, :, : step.tokens.shape[0]]  # an engine may give them fewer columns
        cache = named("past", pad(rows, (0, 0, 0, engine.spec.capacity - rows.shape[4])))
        inputs = {name: getattr(step, name) for name in INPUTS} | cache
        names = [place.tensor for place in self.places.values()]
        found = self._session.run(names, {name: value.numpy() for name, value in inputs.items()})
        tensors = [_by_token(torch.from_numpy(values), *step.tokens.shape) for values in found]
        layers = {path: compared(case, x) for path, x in zip(self.places, tensors, strict=True) if x is not None}
        return {**layers, "logits": logits}


@contextlib.contextmanager
def _recording(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """What the modules without children returned last, by path, in the order they ran; but for the head's.

    The head is given other positions than the rest, and what it returns becomes the logits.
    """
    recorded: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            recorded.pop(name, None)
            recorded[name] = output

        return hook

    head = model.get_output_embeddings()
    modules = [(name, m) for name, m in model.named_modules() if m is not head and next(m.children(), None) is None]
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def _by_token(output: Any, rows: int, steps: int) -> Tensor | None:
    """[R, S, H] of a module's output, if its leading dimensions are rows and tokens, or both in one; else None.

    Rows may be one for all, as of embeddings of positions.
    """
    if isinstance(output, Tensor) and output.is_floating_point():
        if output.ndim > 2 and output.shape[0] in (rows, 1) and output.shape[1] == steps:
            return output.reshape(output.shape[0], steps, -1).expand(rows, -1, -1)
        if output.ndim == 2 and output.shape[0] == rows * steps:
            return output.reshape(rows, steps, -1)
    return None
