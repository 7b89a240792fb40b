"""What is compared: our methods on our engines, and each library plain and with a draft model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engines.openvino.graph import computes_bfloat16
from mtad.errors import InvalidInput
from mtad.methods import METHODS
from scripts.bench.methods import THRESHOLDS
from scripts.bench.peers.models import DRAFT_LEN, Models, missing, python
from scripts.systems import GENAI

PEERS = ("openvino-genai", "llama.cpp", "onnxruntime-genai", "huggingface")
OURS = ("sample", "block", "mtad", "mtad 7x4", "mtad 3x2", "mmtad_sample", "mtad adaptive")
PRECISIONS = {"float32": "in float32", "fastest": "each at its fastest precision"}
"""At which systems are compared. `fastest` computes in bfloat16 where a library can, and leaves the choice to OpenVINO
GenAI, which keeps its cache in 8-bit integers. Weights stay unquantized."""
CAPACITY = 1024
"""Columns of a request's cache, of our export and of llama.cpp's slots."""
GENAI_DRAFTS = 3, DRAFT_LEN, 7
"""OpenVINO GenAI's drafts: on a CPU with AMX, 8 requests of 1 + 3 tokens fill 32 rows of its tiles, and few requests
gain by longer drafts. `mtad` is given the same lengths."""


@dataclass(frozen=True)
class System:
    """One line of the comparison.

    Attributes:
        name: what tables call it.
        command: the process that runs it; systems with equal commands share one.
        job: what its jobs say beside what all say.
        peer: the library; empty for ours.
        method: of ours; else empty.
        drafts: whether a draft model helps it.
        batches: whether it decodes several texts at once; else one after another.
    """

    name: str
    command: tuple[str, ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    peer: str = ""
    method: str = ""
    drafts: bool = False
    batches: bool = True

    @property
    def lossless(self) -> bool:
        """Whether its texts are distributed as the target's samples are.

        OpenVINO GenAI's with a draft model are not. Its rule accepts a drafted token by the ratio of the draft model's
        probability of it to the target's probability of another token, which the target has just drawn
        (`Sampler::validate_candidate` in src/cpp/src/sampling/sampler.cpp, commit 02400d9b).
        """
        if self.peer:
            return not (self.peer == "openvino-genai" and self.drafts)
        return METHODS[self.method.split()[0]].lossless


def method_params(name: str) -> dict[str, Any]:
    """Parameters of a method of ours, with the demo's threshold for source code.

    `mtad` drafts `DRAFT_LEN` tokens in 4 beams, `mtad 7x2` 7 in 2, and `mtad adaptive` adapts drafts of up to twice
    `DRAFT_LEN`.

    Raises:
        InvalidInput: there is no such method, or no such draft.
    """
    method, _, draft = name.partition(" ")
    sizes = re.fullmatch(r"(\d+)x(\d+)", draft)
    if method not in METHODS or not (sizes or draft in ("", "adaptive")):
        known = ", ".join(METHODS)
        raise InvalidInput("methods", name, f"give names of methods, 'mtad adaptive' or 'mtad 7x2'; known: {known}")
    params: dict[str, Any] = {"method": method, "draft_len": 2 * DRAFT_LEN if draft == "adaptive" else DRAFT_LEN}
    if sizes:
        params |= {"draft_len": int(sizes[1]), "beam_width": int(sizes[2])}
    if METHODS[method].rule in ("joint.joint", "joint.joint_sample"):
        params["accept_threshold"] = THRESHOLDS["code"]
    return params | {"speculation": "adaptive" if draft == "adaptive" else "fixed"}


def catalog(
    models: Models, precision: str, methods: Sequence[str], peers: Sequence[str], threads: int, rows: int
) -> list[System]:
    """All systems of one run.

    Args:
        models: the pair, and what the libraries make of it, which is made if need be.
        precision: of `PRECISIONS`.
        methods: of ours.
        peers: of `PEERS`.
        threads: of every system.
        rows: most texts at once.

    Raises:
        InvalidInput: a peer is not installed.
    """
    fast = precision == "fastest"
    common = {"threads": threads, "rows": rows}

    def here(**settings: Any) -> tuple[str, ...]:
        return sys.executable, "-m", "scripts.bench.peers.systems", json.dumps(settings | common)

    has_bf16 = fast and computes_bfloat16()
    engines: dict[str, tuple[str, str | None]] = {f"openvino {'bf16' if has_bf16 else 'f32'}": ("openvino", None)}
    if not fast:
        engines = {"onnxruntime f32": ("cpu", None), "openvino f32": ("openvino", "float32")}
    systems = []
    for engine, (provider, compute) in engines.items():
        command = here(system="ours", pair=str(models.pair()), provider=provider, compute=compute)
        systems += [
            System(f"{m}, {engine}", command, {"params": method_params(m)}, method=m, drafts=m != "sample")
            for m in methods
        ]
    for drafts in (False, True):
        suffix, common = " + draft" if drafts else "", {**common, "draft_len": DRAFT_LEN}
        if "openvino-genai" in peers:
            interpreter, folder = str(python("openvino-genai")), models.openvino
            settings = {**common, "precision": "" if fast else "f32", "target": str(folder / "target")}
            settings["draft"] = str(folder / "auxiliary") if drafts else ""
            command = (interpreter, "-m", "scripts.bench.peers.openvino_genai", json.dumps(settings))
            name = f"openvino-genai {'bf16' if has_bf16 else 'f32'}{', u8 cache' if fast else ''}{suffix}"
            for length in GENAI_DRAFTS if drafts else (0,):
                title = f"{name} of {length}" if drafts else name
                systems.append(System(title, command, {"draft_len": length}, "openvino-genai", drafts=drafts))
        if "llama.cpp" in peers:
            interpreter, folder = str(python("llama.cpp")), models.gguf("BF16" if fast else "F32")
            settings = {**common, "capacity": CAPACITY, "target": str(folder / "target.gguf")}
            settings["kv_cache"] = "F16" if fast else "F32"  # its default, where it may choose
            settings["draft"] = str(folder / "auxiliary.gguf") if drafts else ""
            command = (interpreter, "-m", "scripts.bench.peers.llama_cpp", json.dumps(settings))
            name = f"llama.cpp {'bf16' if fast else 'f32'}{suffix}"
            systems.append(System(name, command, {}, "llama.cpp", drafts=drafts))
        if "onnxruntime-genai" in peers:
            if not (GENAI / "onnxruntime_genai").is_dir():
                raise missing("onnxruntime-genai")
            folder = models.genai if drafts else models.genai / "target"
            command = here(system="onnxruntime-genai", model=str(folder))
            name = f"onnxruntime-genai f32{suffix}"
            systems.append(System(name, command, {}, "onnxruntime-genai", drafts=drafts, batches=not drafts))
        if "huggingface" in peers:
            folders = {role: str(models.checkpoints / role) for role in ("target", "auxiliary")}
            command = here(system="huggingface", dtype="bfloat16" if fast else "float32", **folders)
            name = f"huggingface {'bf16' if fast else 'f32'}{suffix}"
            job = {"assisted": drafts}
            systems.append(System(name, command, job, "huggingface", drafts=drafts, batches=not drafts))
    return systems


def at_temperature(systems: Sequence[System], temperature: float) -> list[System]:
    """The peers with draft models once more, at another temperature. The others' speed does not depend on it."""
    job = {"temperature": temperature}
    return [
        replace(one, name=f"{one.name}, T={temperature:g}", job={**one.job, **job})
        for one in systems
        if one.peer and one.drafts
    ]
