"""What is compared: our methods on our engines, and each library plain and with the auxiliary as its draft model."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtad.errors import InvalidInput
from mtad.methods import METHODS
from scripts.paths import ROOT

SIZES = ("demo", "78M", "310M", "1B")
PRECISIONS = {
    "float32": "in float32",
    "fastest": "each at its fastest precision",
    "int8": "with weights of 8 bits",
    "int4": "with weights of 4 bits",
}
"""`fastest` is bfloat16 where a library can, and what OpenVINO GenAI chooses, with a cache of 8-bit integers. Weights
of 8 and 4 bits are those that each library makes of the checkpoint by itself."""
LIBRARIES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("float32", "onnxruntime", "ours", {"provider": "cpu", "compute": None}),
    ("float32", "openvino", "ours", {"provider": "openvino", "compute": "float32"}),
    ("float32", "openvino-genai", "openvino_genai", {"weights": "fp32", "precision": "f32"}),
    ("float32", "llama.cpp", "llama_cpp", {"weights": "F32", "kv_cache": "F32"}),
    ("float32", "onnxruntime-genai", "onnxruntime_genai", {"builder": "fp32"}),
    ("float32", "huggingface", "huggingface", {"dtype": "float32"}),
    ("fastest", "openvino", "ours", {"provider": "openvino", "compute": None}),
    ("fastest", "openvino-genai", "openvino_genai", {"weights": "fp32", "precision": ""}),
    ("fastest", "llama.cpp", "llama_cpp", {"weights": "BF16", "kv_cache": "F16"}),
    ("fastest", "onnxruntime-genai", "onnxruntime_genai", {"builder": "fp32"}),
    ("fastest", "huggingface", "huggingface", {"dtype": "bfloat16"}),
    ("int8", "onnxruntime", "ours", {"provider": "cpu", "compute": None}),
    ("int8", "openvino", "ours", {"provider": "openvino", "compute": None}),
    ("int8", "openvino-genai", "openvino_genai", {"weights": "int8", "precision": ""}),
    ("int8", "llama.cpp", "llama_cpp", {"weights": "Q8_0", "kv_cache": "F16"}),
    ("int4", "onnxruntime", "ours", {"provider": "cpu", "compute": None}),
    ("int4", "openvino", "ours", {"provider": "openvino", "compute": None}),
    ("int4", "openvino-genai", "openvino_genai", {"weights": "int4", "precision": ""}),
    ("int4", "llama.cpp", "llama_cpp", {"weights": "Q4_0", "kv_cache": "F16"}),
    ("int4", "onnxruntime-genai", "onnxruntime_genai", {"builder": "int4"}),
)
"""Precision, library (of `ours`, the engine), module of its worker, and what that module's settings say besides."""
PEERS = tuple(dict.fromkeys(name for _, name, module, _ in LIBRARIES if module != "ours"))
OURS = ("sample", "greedy", "block", "mtad", "mtad 7x4", "mtad 3x2", "mmtad_sample", "block auto")
DRAFT_LEN = 4  # tokens of a draft, ours and theirs
DRAFTS = {"openvino-genai": (3, DRAFT_LEN, 7)}
"""Libraries that are given more than one length, as `mtad` is. On a CPU with AMX, 8 requests of 1 + 3 tokens fill 32
rows of its tiles, and few requests gain by longer drafts."""
LOOKED_UP = {"openvino-genai": (4, 8, 16), "llama.cpp": (4, 8, 16)}
"""Libraries whose drafts are looked up with `--edit`, and lengths that they are given; ours follow what pays."""
OURS_LOOKED_UP = ("block lookup", "block lookup+model")
ONE_DRAFT = ("onnxruntime-genai", "huggingface")
"""Libraries that decode one text at a time where they draft."""
THRESHOLD = 0.1  # tau of joint acceptance on source code
BASELINES = ROOT / "build" / "baselines"  # where scripts/baselines.sh puts each library's environment


@dataclass(frozen=True)
class System:
    """One line of the comparison.

    Attributes:
        command: the process that runs it; systems with equal commands share one.
        job: what its jobs say beside what all say.
        library: of ours, the engine.
        method: of ours; empty for a peer.
        batches: whether it decodes several texts at once; else one after another.
    """

    name: str
    command: tuple[str, ...]
    job: Mapping[str, Any]
    library: str
    method: str = ""
    batches: bool = True


def method_params(name: str) -> dict[str, Any]:
    """Parameters of `mtad`, say, of `mtad 7x2` (7 tokens, 2 beams), `mtad auto`; greedily, of `block lookup`, `greedy`.

    Raises:
        InvalidInput: there is no such method, or no such draft.
    """
    if name == "greedy":
        return {"method": "sample", "temperature": 0.0}
    method, _, draft = name.partition(" ")
    sizes = re.fullmatch(r"(\d+)x(\d+)", draft)
    if method not in METHODS or not (sizes or draft in ("", "auto", "lookup", "lookup+model")):
        known = ", ".join(METHODS)
        raise InvalidInput("methods", name, f"give names of methods, 'mtad auto' or 'mtad 7x2'; known: {known}")
    params: dict[str, Any] = {"method": method, "draft_len": DRAFT_LEN}
    if sizes:
        params |= {"draft_len": int(sizes[1]), "beam_width": int(sizes[2])}
    if draft == "auto":
        params["draft_len"] = "auto"
    elif draft.startswith("lookup"):
        params |= {"draft_len": "auto", "draft": draft, "temperature": 0.0}
    if METHODS[method].rule in ("joint.joint", "joint.joint_sample"):
        params["accept_threshold"] = THRESHOLD
    return params


def catalog(options: Namespace, precision: str, settings: Mapping[str, Any]) -> list[System]:
    """All systems of one precision. `sample` is always one.

    Args:
        options: of the command.
        settings: of every worker.

    Raises:
        InvalidInput: a method is unknown, or a peer is not installed.
    """
    methods = OURS_LOOKED_UP if options.edit else options.methods
    found, jobs = list[System](), {name: {"params": method_params(name)} for name in ("sample", *methods)}
    for own, library, module, others in LIBRARIES:
        if own != precision or (module != "ours" and library not in options.peers):
            continue
        said = {**settings, **others}
        alone = _command(library, module, {**said, "draft_len": 0})
        if module == "ours":
            found += [System(f"{name}, {library}", alone, job, library, name) for name, job in jobs.items()]
            continue
        found.append(System(library, alone, {}, library))
        lengths = LOOKED_UP.get(library, ()) if options.edit else DRAFTS.get(library, (DRAFT_LEN,))
        for length in lengths:
            name = f"{library} + draft of {length}" if len(lengths) > 1 else f"{library} + draft"
            drafts = {"draft_len": length, "lookup": True} if options.edit else {"draft_len": DRAFT_LEN}
            drafting, job = _command(library, module, {**said, **drafts}), dict[str, Any](draft_len=length)
            found.append(System(name, drafting, job, library, batches=library not in ONE_DRAFT))
            if options.peer_temperature is not None:  # on which the speed without drafts does not depend
                job = {**job, "temperature": options.peer_temperature}
                found.append(replace(found[-1], name=f"{name}, T={options.peer_temperature:g}", job=job))
    return found


def _command(library: str, module: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    own = BASELINES / library / "bin" / "python"
    python = sys.executable if library == "huggingface" or module == "ours" else str(own)
    if not Path(python).is_file():
        raise InvalidInput("peers", library, f"not installed; run scripts/baselines.sh {library}, or leave it out")
    return python, "-m", f"scripts.bench.peers.{module}", json.dumps(settings)
