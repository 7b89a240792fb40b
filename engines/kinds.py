"""The kinds of engines: one row for each way in which an engine folder can be run. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mtad.errors import InvalidInput, imported

if TYPE_CHECKING:
    from engines.base import Engine, EngineSpec
    from engines.placement import Placement

PRECISIONS = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "float32",
    "int4": "float32",
    "int8-static": "float16",
    "fp8": "float16",
}
"""Dtype of cache and logits, by what the weights are. `int8` and `int4` are weight-only, in blocks; with `int8-static`
and `fp8` (E4M3) activations are what the weights are, in a range found on text beforehand (W8A8)."""

QUANTIZED = ("int8", "int4")
"""Precisions of the weights alone, made from a float32 graph."""
STATIC = ("int8-static", "fp8")
"""Precisions of weights and activations, made by Model Optimizer."""

ATTENTION = ("operator", "decomposed")
"""Forms of a graph's attention, see `engines.base.EngineSpec.attention`."""

_HALF, _ALL = ("float32", "float16"), ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Kind:
    """A kind of engine.

    Attributes:
        format: of its folder, as `engine.json` has it.
        provider: what runs a folder of this format, where there is a choice; else empty.
        stored: what the folder holds: a `graph` (ONNX), a `checkpoint` (Hugging Face), or a `plan` of a compiler.
        files: the model files.
        opener: `module:function`, or a class; called with folder, specification and placement.
        devices: types of the devices that it runs on.
        dtypes: of cache and logits that it computes with.
        precisions: of the weights, which an export to the format makes; the first is made by default.
        options: what `Placement` may say of this kind alone.
        paged: whether its rows share a pool of pages.
        compiler: the Python module that builds and runs its plans.
        compiles: what its plans are made of.
        spare_columns: of its rows, behind their capacity: they take what padded rows of captured blocks write.
        ahead_of_time: whether plans are built without a GPU, for compute capabilities; else on the GPU that runs them.
    """

    format: str
    provider: str
    stored: Literal["graph", "checkpoint", "plan"]
    files: tuple[str, ...]
    opener: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    precisions: tuple[str, ...] = _ALL
    options: tuple[str, ...] = ()
    paged: bool = False
    compiler: str = ""
    compiles: Literal["graph", "checkpoint"] = "graph"
    spare_columns: int = 0
    ahead_of_time: bool = False

    @property
    def of_graph(self) -> bool:
        """Whether a graph is traced for it: what it holds is one, or is made of one."""
        return self.stored == "graph" or (self.stored == "plan" and self.compiles == "graph")

    def open(self, folder: Path, spec: EngineSpec, placement: Placement) -> Engine:
        """Open a folder of this kind; what only this kind needs is imported now."""
        module, _, name = self.opener.partition(":")
        found = imported(module, "format", self.format, "install the package that runs it")
        function: Callable[..., Engine] = getattr(found, name)
        return function(folder, spec, placement)


_GRAPH = Kind(
    format="onnx",
    provider="cpu",
    stored="graph",
    files=("model.onnx", "model.onnx.data"),
    opener="engines.onnx.engine:open_onnxruntime",
    devices=("cpu",),
    dtypes=_HALF,
    precisions=_ALL + QUANTIZED,
)
_PLAN = Kind(
    format="tensorrt",
    provider="",
    stored="plan",
    files=("model.engine",),
    opener="engines.tensorrt.engine:open_tensorrt",
    devices=("cpu", "cuda"),  # it runs on a GPU whatever device is given
    dtypes=_ALL,
    precisions=("float16", "float32", "bfloat16", *STATIC),  # the oldest GPUs take float16 alone
    compiler="tensorrt",
    spare_columns=128,  # pages for the 65 tokens of a step
)
KINDS = (
    _GRAPH,
    replace(_GRAPH, provider="cuda", devices=("cuda",), dtypes=_ALL),
    replace(
        _GRAPH,
        provider="openvino",
        opener="engines.openvino.engine:OpenVinoEngine",
        options=("compute", "kv_cache"),
        paged=True,
    ),
    Kind(
        format="torch",
        provider="",
        stored="checkpoint",
        files=("config.json", "model.safetensors"),
        opener="engines.pytorch.engine:open_torch",
        devices=("cpu", "cuda"),
        dtypes=_ALL,
        options=("attention",),
        paged=True,
    ),
    _PLAN,
    replace(_PLAN, format="tensorrt-rtx", compiler="tensorrt_rtx", ahead_of_time=True),
    replace(
        _PLAN,
        format="tensorrt-llm",
        opener="engines.tensorrt_llm.engine:open_tensorrt_llm",
        dtypes=("float16", "bfloat16"),
        precisions=("float16", "bfloat16"),
        paged=True,
        compiles="checkpoint",
        spare_columns=0,
    ),
)

FORMATS = {kind.format: kind for kind in KINDS}
"""A kind of each format, for what all kinds of the format share: all but provider, devices, dtypes and options."""

GRAPH = _GRAPH.format
"""The format that plans and quantized engines are made from."""


def kind_of(format: str, provider: str | None, device: str) -> Kind:
    """The kind of an engine.

    Args:
        provider: the one asked for; None: that of the device, where there are several.
        device: torch's name of it.

    Raises:
        InvalidInput: an unknown provider, or one of another format or device.
    """
    known = [kind.provider for kind in KINDS if kind.provider]
    if provider is not None and provider not in known:
        raise InvalidInput("provider", provider, f"give one of {', '.join(known)}")
    kinds, place = [kind for kind in KINDS if kind.format == format], device.partition(":")[0]
    found = [kind for kind in kinds if provider in (None, kind.provider)]
    if not found:
        raise InvalidInput("provider", provider, f"runs ONNX graphs, but the engine has format {format}; leave it out")
    fitting = [kind for kind in found if place in kind.devices]
    if not fitting:
        wanted = found[0].devices[0]
        raise InvalidInput("provider", provider, f"does not run on the device {device}; give device {wanted}")
    return fitting[0]
