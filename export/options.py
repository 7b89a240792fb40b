"""`ExportOptions`: what to export, and as what. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and as what. The commands make their options of it.

    Attributes:
        target: checkpoint of the target: a local folder or a hub id.
        auxiliary: checkpoint of the auxiliary, with the same vocabulary.
        revision: branch, tag or commit of a target on the hub; by default, its main branch.
        auxiliary_revision: branch, tag or commit of an auxiliary on the hub.
        rows: requests at once, of both engines.
        capacity: KV columns per row, a multiple of 64: prompt, new tokens and one draft tree must fit. By default 1024,
            or as many as both models have positions for.
        precision: of the target: float32, float16, bfloat16, int8 or int4 (weights alone), int8-dynamic; int8-static
            and fp8 for TensorRT. By default float32, and float16 for TensorRT (whose oldest GPUs take nothing else) and
            TensorRT-LLM.
        auxiliary_precision: of the auxiliary; by default, the target's.
        calibration: text to measure a quantized pair on: JSON lines with prompt and optionally answer. Required if and
            only if something is quantized.
        format: onnx for ONNX Runtime, torch for the reference engine, tensorrt for the GPU of this machine,
            tensorrt-rtx for GPUs of the compute capabilities given.
        attention: operator, or decomposed for runtimes that do not know the operators of opset 24.
        compute_capabilities: of tensorrt-rtx, such as 8.6; by default, all that it knows.
        defaults: decoding parameters to put into pair.json.
    """

    target: str
    auxiliary: str
    _: KW_ONLY
    revision: str | None = None
    auxiliary_revision: str | None = None
    rows: int = 8
    capacity: int | None = None
    precision: str | None = None
    auxiliary_precision: str | None = None
    calibration: Path | None = None
    format: str = "onnx"
    attention: str = "operator"
    compute_capabilities: Sequence[str] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
