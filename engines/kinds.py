"""The kinds of engines: one row for each way in which an engine folder can be run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtad.errors import InvalidInput

if TYPE_CHECKING:
    from engines.base import Engine, EngineSpec
    from engines.placement import Placement


@dataclass(frozen=True)
class Kind:
    """A kind of engine.

    Attributes:
        format: of its folder, as `engine.json` has it.
        provider: what runs a folder of this format, where there is a choice; else empty.
        stored: what the folder holds: a `graph` (ONNX), a `checkpoint` (Hugging Face), or a `plan` of a compiler.
        files: the model files.
        opener: `module:function`; called with folder, specification and placement.
        devices: types of the devices that it runs on.
        dtypes: of cache and logits that it computes with.
        options: what `Placement` may say of this kind alone.
        paged: whether its rows share a pool of pages.
        capturable: whether its steps can be part of a captured block on a GPU.
    """

    format: str
    provider: str
    stored: Literal["graph", "checkpoint", "plan"]
    files: tuple[str, ...]
    opener: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    options: tuple[str, ...] = ()
    paged: bool = False
    capturable: bool = False

    def open(self, folder: Path, spec: EngineSpec, placement: Placement) -> Engine:
        """Open a folder of this kind; what only this kind needs is imported now."""
        module, _, name = self.opener.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        engine: Engine = function(folder, spec, placement)
        return engine


_GRAPH_FILES, _PLAN_FILES = ("model.onnx", "model.onnx.data"), ("model.engine",)
_HALF, _ALL = ("float32", "float16"), ("float32", "float16", "bfloat16")
_ONNX, _PLAN = "engines.onnx.engine:open_onnxruntime", "engines.tensorrt.engine:open_tensorrt"

KINDS = (
    Kind("onnx", "cpu", "graph", _GRAPH_FILES, _ONNX, devices=("cpu",), dtypes=_HALF),
    Kind("onnx", "cuda", "graph", _GRAPH_FILES, _ONNX, devices=("cuda",), dtypes=_ALL),
    Kind(
        format="onnx",
        provider="openvino",
        stored="graph",
        files=_GRAPH_FILES,
        opener="engines.openvino.engine:open_openvino",
        devices=("cpu",),
        dtypes=_HALF,
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
        capturable=True,
    ),
    Kind("tensorrt", "", "plan", _PLAN_FILES, _PLAN, devices=("cpu", "cuda"), dtypes=_ALL),
    Kind("tensorrt-rtx", "", "plan", _PLAN_FILES, _PLAN, devices=("cpu", "cuda"), dtypes=_ALL),
)
"""A plan runs on a GPU whatever device is given."""

FORMATS = {kind.format: kind for kind in KINDS}
"""A kind of each format, for what all kinds of the format share: `stored` and `files`."""


def providers() -> tuple[str, ...]:
    """All providers, by name."""
    return tuple(kind.provider for kind in KINDS if kind.provider)


def kind_of(format: str, provider: str | None, device: str) -> Kind:
    """The kind of an engine.

    Args:
        provider: the one asked for; None: that of the device, where there are several.
        device: torch's name of it.

    Raises:
        InvalidInput: an unknown provider, or one of another format or device.
    """
    if provider is not None and provider not in providers():
        raise InvalidInput("provider", provider, f"give one of {', '.join(providers())}")
    kinds, place = [kind for kind in KINDS if kind.format == format], device.partition(":")[0]
    found = [kind for kind in kinds if provider in (None, kind.provider)]
    if not found:
        raise InvalidInput("provider", provider, f"runs ONNX graphs, but the engine has format {format}; leave it out")
    fitting = [kind for kind in found if place in kind.devices]
    if not fitting:
        wanted = found[0].devices[0]
        raise InvalidInput("provider", provider, f"does not run on the device {device}; give device {wanted}")
    return fitting[0]
