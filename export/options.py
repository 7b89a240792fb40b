"""`ExportOptions`: what to export, and as what. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from engines.kinds import ATTENTION, FORMATS, PRECISIONS, QUANTIZED, STATIC
from mtad.errors import InvalidInput, no_folder
from mtad.params import DecodingParams

GGUF = ".gguf"
"""Ends the name of a file that is a checkpoint."""
ADAPTER = "adapter_config.json"
"""A folder with it holds a LoRA adapter."""
Progress = Callable[[str], None]
"""Is told the name of each stage as it begins."""
MEASURED = (*QUANTIZED, *STATIC)
"""Precisions that are measured on text."""


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and as what. The commands make their options of it.

    Attributes:
        target: checkpoint of the target: a local folder, a hub id, a GGUF file, or the folder of a LoRA adapter.
        auxiliary: checkpoint of the auxiliary; without, drafts are looked up in the text.
        revision: branch, tag or commit of a target on the hub; by default, its main branch.
        auxiliary_revision: branch, tag or commit of an auxiliary on the hub.
        rows: requests at once, of both engines.
        capacity: KV columns per row, a multiple of 64: prompt, new tokens and one draft tree must fit. By default 4096,
            or as many as both models have positions for.
        precision: of the target: float32, float16, bfloat16, int8 or int4 (weights alone); int8-static
            and fp8 for TensorRT. By default float32, and float16 for TensorRT (whose oldest GPUs take nothing else) and
            TensorRT-LLM.
        auxiliary_precision: of the auxiliary; by default, the target's.
        calibration: text to measure a quantized pair on: JSON lines with prompt and optionally answer. By default a
            few neutral texts of ours, of which the report says so; int8-static and fp8 need text like that in
            production, since their scales follow from it.
        format: onnx for ONNX Runtime, torch for the reference engine, tensorrt for the GPU of this machine,
            tensorrt-rtx for GPUs of the compute capabilities given; tensorrt-llm for that library's plans.
        attention: operator, or decomposed for runtimes that do not know the operators of opset 24.
        compute_capabilities: of tensorrt-rtx, such as 8.6; by default, all that it knows.
        defaults: decoding parameters to put into pair.json, over what the target's generation_config.json recommends.

    Raises:
        InvalidInput: a value is not usable, whatever the checkpoints are.
    """

    target: str
    auxiliary: str | None = None
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

    def __post_init__(self) -> None:
        from engines.base import KV_PAGE  # with torch, which the help of a command does without

        if self.rows < 1:
            raise InvalidInput("rows", self.rows, "give at least 1")
        if self.capacity is not None and (self.capacity < 2 * KV_PAGE or self.capacity % KV_PAGE):
            raise InvalidInput("capacity", self.capacity, f"give a multiple of {KV_PAGE}, at least {2 * KV_PAGE}")
        if self.format not in FORMATS:
            raise InvalidInput("to", self.format, f"choose one of {', '.join(FORMATS)}")
        for name in ("target", "auxiliary") if self.auxiliary is not None else ("target",):
            source = getattr(self, name)
            named = source.count("/") == 1 and not source.startswith((".", "/", "~")) and not Path(source).is_file()
            if not Path(source).is_dir() and not named and not (source.endswith(GGUF) and Path(source).is_file()):
                raise InvalidInput(name, source, f"{no_folder(source)}, and not a hub id of the form owner/name")
        params = DecodingParams.from_dict(dict(self.defaults))
        if self.auxiliary is None:
            for name in ("auxiliary_revision", "auxiliary_precision"):
                if (value := getattr(self, name)) is not None:
                    raise InvalidInput(name, value, "there is no auxiliary; leave it out")
            if params.draft is not None and (params.uses_model or params.thinking.uses_model):
                raise InvalidInput("defaults draft", params.draft, "there is no auxiliary; give lookup")
        kind = FORMATS[self.format]
        for name, value in zip(("precision", "auxiliary_precision"), self.precisions, strict=False):
            if value not in PRECISIONS:
                raise InvalidInput(name, value, f"choose one of {', '.join(PRECISIONS)}")
            able = [known for known, one in FORMATS.items() if value in one.precisions]
            if self.format not in able or (value in MEASURED and self.attention != ATTENTION[0]):
                problem = f"needs --to {' or '.join(able)} and operator attention"
                raise InvalidInput(name, value, f"{problem}, not {self.format} and {self.attention} attention")
        if self.calibration is not None and not self.measured:
            raise InvalidInput("calibration", str(self.calibration), "nothing is quantized; leave it out")
        if self.calibration is None and any(value in STATIC for value in self.precisions):
            problem = "give text like that in production: the scales of int8-static and fp8 follow from it"
            raise InvalidInput("calibration", None, problem)
        if self.attention not in ATTENTION or (not kind.of_graph and self.attention != ATTENTION[0]):
            problem = f"choose one of {', '.join(ATTENTION)}; what is no graph has only the first"
            raise InvalidInput("attention", self.attention, problem)
        if self.compute_capabilities and not kind.ahead_of_time:
            given, able = " ".join(self.compute_capabilities), [name for name in FORMATS if FORMATS[name].ahead_of_time]
            raise InvalidInput("compute-capability", given, f"only for --to {' or '.join(able)}")

    @property
    def precisions(self) -> tuple[str, ...]:
        """Of the target and of the auxiliary, if there is one."""
        precision = self.precision or FORMATS[self.format].precisions[0]
        return (precision,) if self.auxiliary is None else (precision, self.auxiliary_precision or precision)

    @property
    def measured(self) -> bool:
        """Whether some engine is quantized, and so measured on text."""
        return any(value in MEASURED for value in self.precisions)
