"""Checkpoints of each size, and what each library makes of them; all is made once and kept under build/peers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engines.folder import write_folder
from export.checkpoint.checkpoint import find
from export.options import ExportOptions
from export.pair import export_pair
from mtad.errors import Failed, InvalidInput
from scripts.bench.peers.worker import QUIET
from scripts.demo import inflate
from scripts.paths import DEMO, ROOT
from scripts.systems import GENAI

ROLES = ("target", "auxiliary")
SIZES = ("demo", *inflate.SIZES)
"""The demo pair as it is, and copies of it that cost what larger models cost."""


class Models:
    """The pair of one size.

    Args:
        size: one of `SIZES`.
        root: where all that is made is kept.
    """

    def __init__(self, size: str, root: Path) -> None:
        digest = "".join(find(role, str(DEMO / "pair" / role)).digest[:6] for role in ROLES)
        self.size, self.folder = size, root / f"{size}-{digest}"

    @property
    def checkpoints(self) -> Path:
        """With `target` and `auxiliary`."""
        if self.size == "demo":
            return DEMO / "pair"

        def write(folder: Path) -> None:
            for role, parameters in zip(ROLES, inflate.SIZES[self.size], strict=True):
                inflate.inflate(DEMO / "pair" / role, folder / role, parameters)

        return self._once("checkpoints", write)

    def pair(self, format: str = "onnx") -> Path:
        """Our export."""
        folder, options = self.folder / f"pair-{format}", [str(self.checkpoints / role) for role in ROLES]
        export_pair(folder, ExportOptions(*options, format=format), overwrite=True)  # nothing, where it is up to date
        return folder

    @property
    def openvino(self) -> Path:
        """What optimum-intel makes, in float32."""

        def write(folder: Path) -> None:
            for role in ROLES:
                source = str(self.checkpoints / role)
                what = ("--task", "text-generation-with-past", "--weight-format", "fp32", str(folder / role))
                program = str(python("openvino-genai").with_name("optimum-cli"))
                _run("openvino-genai", program, "export", "openvino", "--model", source, *what)

        return self._once("openvino", write)

    def gguf(self, kind: str) -> Path:
        """Folder with target.gguf and auxiliary.gguf, weights in `F32` or `BF16`."""

        def write(folder: Path) -> None:
            for role in ROLES:
                program = (str(python("llama.cpp")), "-m", "scripts.bench.peers.gguf_file")
                _run("llama.cpp", *program, str(self.checkpoints / role), str(folder / f"{role}.gguf"), kind)

        return self._once(f"gguf-{kind}", write)

    @property
    def genai(self) -> Path:
        """What onnxruntime-genai's builder makes, in float32; the folder itself is the target with its draft model."""

        def write(folder: Path) -> None:
            program = (sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu")
            for role in ROLES:
                what = ("-i", str(self.checkpoints / role), "-o", str(folder / role), "-c", str(folder / "cache"))
                _run("onnxruntime-genai", *program, *what, PYTHONPATH=str(GENAI))
            both, draft = (json.loads((folder / role / "genai_config.json").read_text()) for role in ROLES)
            for role, config in zip(ROLES, (both, draft), strict=True):
                decoder = config["model"]["decoder"]
                decoder["filename"] = f"{role}/{decoder['filename']}"
            both["model"]["draft"] = draft["model"]["decoder"]
            both["model"]["draft"]["session_options"]["intra_op_num_threads"] = 1  # as our auxiliary's
            both["speculative"] = {"max_draft_tokens": DRAFT_LEN}
            (folder / "genai_config.json").write_text(json.dumps(both, indent=2), encoding="utf-8")
            for file in (folder / "target").glob("*token*"):
                shutil.copy(file, folder)

        return self._once("genai", write)

    def _once(self, name: str, write: Callable[[Path], None]) -> Path:
        folder = self.folder / name
        if not folder.is_dir():
            print(f"{self.size}: making {name}", file=sys.stderr)
            with write_folder(folder) as new:
                write(new)
        return folder


DRAFT_LEN = 4
"""Tokens of a draft, ours and theirs; Hugging Face keeps its own schedule, which ends a draft where it is unsure."""


def python(peer: str) -> Path:
    """The interpreter of the environment that scripts/baselines.sh made.

    Raises:
        InvalidInput: it made none.
    """
    found = GENAI / peer / "bin" / "python"
    if not found.is_file():
        raise missing(peer)
    return found


def missing(peer: str) -> InvalidInput:
    """The error of a peer that is not installed."""
    return InvalidInput("peers", peer, f"not installed; run scripts/baselines.sh {peer}, or leave it out")


def _run(peer: str, *command: str, **environment: str) -> None:
    import os

    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **QUIET, **environment}, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        end = "\n".join((ran.stdout + ran.stderr).splitlines()[-12:])
        raise Failed(f"{peer} cannot convert the checkpoint: {' '.join(command)} ended with {ran.returncode}:\n{end}")
