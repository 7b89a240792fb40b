"""Plans of TensorRT and TensorRT-RTX from an exported graph, through Polygraphy.

TensorRT times kernels on the GPU it builds on: never executed here, for want of one. TensorRT-RTX builds ahead of time,
without a GPU, for the compute capabilities it is told.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engines.base import KV_PAGE, EngineSpec, input_shapes
from engines.folder import cache_folder
from engines.kinds import FORMATS
from engines.tensorrt_plan import TensorRtPlan, current_gpu, load_runtime
from mtad.errors import InvalidInput, imported

log = logging.getLogger(__name__)

PREFILL_TOKENS = 256
"""Of the prefill profile: what the runtime stores of a prompt at a time, where the capacity has room for it."""
DECODE_TOKENS = 65
"""Of the decode profile: a root and the largest tree, `max_draft_len` x `max_beam_width` = 8 x 8."""
OLDEST = {"operator": (10, 15), "decomposed": (10, 3), "ahead of time": (1, 7)}
"""Oldest versions, by the form of attention. 10.15's parser is the first with RotaryEmbedding and RMSNormalization,
and TensorScatter; 10.3 is JetPack 6.1's; of TensorRT-RTX, what was tried."""
BFLOAT16, FLOAT8 = (8, 0), (8, 9)
"""Least compute capabilities that multiply bfloat16, and 8-bit floating point."""


def plan_for(format: str, spec: EngineSpec, capabilities: Sequence[str] = ()) -> TensorRtPlan:
    """What a plan of `spec` would be built with and for; everything that can be refused is refused here.

    Args:
        capabilities: compute capabilities to build for, such as `8.6`; TensorRT-RTX alone. Default: all of its own.

    Raises:
        InvalidInput: the runtime is missing or too old, or cannot build this for that; there is no GPU to build on.
    """
    needed = FLOAT8 if spec.precision == "fp8" else BFLOAT16 if spec.dtype == "bfloat16" else (0, 0)
    trt = load_runtime(format)
    _check_polygraphy(format)
    version = str(trt.__version__)
    oldest = OLDEST["ahead of time" if FORMATS[format].ahead_of_time else spec.attention]
    if tuple(int(part) for part in version.split(".")[:2]) < oldest:
        remedy = "it lacks cache updates, rotations and norms: install a newer one, or give --attention decomposed"
        if spec.attention == "decomposed":
            remedy = "install a newer one"
        raise InvalidInput(f"{format} version", version, f"older than {'.'.join(map(str, oldest))}; {remedy}")
    if not FORMATS[format].ahead_of_time:
        gpu = current_gpu()
        if gpu is None:
            problem = "it builds on the GPU that will run the plan, but torch finds none; tensorrt-rtx needs no GPU"
            raise InvalidInput("to", format, problem)
    else:
        names = [name[2:] for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
        gpu, known = None, sorted((f"{name[:-1]}.{name[-1]}" for name in names), key=_pair)
        for capability in capabilities:
            if capability not in known:
                problem = f"TensorRT-RTX {version} builds for {', '.join(known)}; elsewhere, use --to tensorrt"
                raise InvalidInput("compute-capability", capability, problem)
        if not capabilities:
            capabilities = [c for c in known if _pair(c) >= needed]
    targets = [gpu.compute_capability] if gpu else sorted(set(capabilities), key=_pair)
    if _pair(targets[0]) < needed:
        if spec.precision == "fp8":
            remedy = "8.9 and later do; give int8-static or float16, or leave that GPU out"
            raise InvalidInput("precision", "fp8", f"compute capability {targets[0]} does not support it; {remedy}")
        raise InvalidInput("dtype", spec.dtype, f"compute capability {targets[0]} does not support it; give float16")
    prefill = min(PREFILL_TOKENS, spec.capacity)
    return TensorRtPlan(version, gpu.name if gpu else None, tuple(targets), spec.rows, DECODE_TOKENS, prefill)


def build_plan(graph: Path, spec: EngineSpec, path: Path) -> None:
    """Build the plan of an exported graph: strongly typed, with one optimization profile each for prompts and drafts.

    TensorRT keeps the times of kernels it tried in the user's cache folder, so that building again is faster and makes
    the same choice. In float32 attention has no kernel and is built as its parts. With TensorRT: not executed.

    Raises:
        InvalidInput: the parser or the builder refuses the graph; with what it said.
    """
    assert spec.plan is not None
    _check_polygraphy(spec.format)
    from polygraphy.backend.trt import (
        CreateConfig,
        EngineBytesFromNetwork,
        NetworkFromOnnxPath,
        PostprocessConfig,
        Profile,
        SetDecomposableAttentions,
    )
    from polygraphy.exception import PolygraphyException

    profiles = []
    for shapes in profile_shapes(spec, spec.plan):
        profile = Profile()
        for name, (least, likeliest, largest) in shapes.items():
            profile.add(name, least, likeliest, largest)
        profiles.append(profile)
    times: str | None = None
    if not FORMATS[spec.format].ahead_of_time:
        gpu = "".join(c if c.isalnum() else "-" for c in spec.plan.gpu or "")
        (folder := cache_folder() / "tensorrt").mkdir(parents=True, exist_ok=True)
        times = str(folder / f"{gpu}-{spec.plan.compute_capabilities[0]}-{spec.plan.version}.timing")
        config: Any = CreateConfig(profiles=profiles, load_timing_cache=times if Path(times).is_file() else None)
    else:
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        targets = [_pair(capability) for capability in spec.plan.compute_capabilities]
        config = PostprocessConfig(CreateConfigRTX(profiles=profiles, compute_capabilities=targets), _capturable)
    network: Any = NetworkFromOnnxPath(str(graph), strongly_typed=True)
    if spec.dtype == "float32" and spec.attention == "operator":
        network = SetDecomposableAttentions(network)
    with _polygraphy_log() as said:
        try:
            plan = EngineBytesFromNetwork(network, config, save_timing_cache=times)()
        except PolygraphyException as error:
            lines = [*(line for line in said if "In node" in line), *said, str(error)]  # the parser's own words first
            problem = f"{spec.architecture} cannot be built ({' '.join(lines[0].split())})"
            if spec.attention == "operator":
                problem += "; --attention decomposed uses older operators"
            raise InvalidInput("to", spec.format, problem) from error
    path.write_bytes(plan)


def profile_shapes(spec: EngineSpec, plan: TensorRtPlan) -> list[dict[str, tuple[tuple[int, ...], ...]]]:
    """Least, likeliest and largest shape of every input, for each profile, in the engine's order: prompts, drafts.

    Of the decode profile the likeliest is that of scoring a tree of 16 nodes for half of the rows, half of the way.
    """
    half = max(KV_PAGE, spec.capacity // 2 // KV_PAGE * KV_PAGE)
    long, wide = plan.prefill_tokens, plan.decode_tokens
    ranges = [
        ((1, 1, KV_PAGE, 1), (1, long, half, 1), (1, long, spec.capacity, long)),
        (
            (1, 1, KV_PAGE, 1),
            (-(-plan.decode_rows // 2), min(17, wide), half, min(17, wide)),
            (plan.decode_rows, wide, spec.capacity, wide),
        ),
    ]
    profiles = []
    for profile in ranges:
        each = [input_shapes(spec, *shape) for shape in profile]
        profiles.append({name: tuple(shapes[name] for shapes in each) for name in each[0]})
    return profiles


def _capturable(builder: Any, network: Any, config: Any) -> None:
    """TensorRT-RTX lets only such plans be recorded as CUDA graphs that take all memory from the caller."""
    config.set_flag(load_runtime("tensorrt-rtx").BuilderFlag.REQUIRE_USER_ALLOCATION)


def _pair(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def _check_polygraphy(format: str) -> None:
    """Polygraphy is for one of the two runtimes in a process; it looks up which when its part for them is imported."""
    wanted = FORMATS[format].ahead_of_time
    config: Any = imported("polygraphy.config", "to", format, f"the extra {format} installs it")
    if "polygraphy.backend.trt" not in sys.modules:
        config.USE_TENSORRT_RTX = wanted
    if wanted != config.USE_TENSORRT_RTX:
        raise InvalidInput("to", format, "a plan of another format was built in this process; use another one")


@contextlib.contextmanager
def _polygraphy_log() -> Iterator[list[str]]:
    from polygraphy.logger import G_LOGGER

    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            (said.append if record.levelno >= logging.ERROR else log.debug)(record.getMessage())

    logger, handler = logging.getLogger("Polygraphy"), Keep()
    before = G_LOGGER.use_python_logging_system, G_LOGGER.colors, G_LOGGER.letter, logger.propagate
    G_LOGGER.use_python_logging_system, G_LOGGER.colors, G_LOGGER.letter, logger.propagate = True, False, False, False
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        G_LOGGER.use_python_logging_system, G_LOGGER.colors, G_LOGGER.letter, logger.propagate = before
