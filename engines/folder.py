"""Engine folders: `engine.json` and what it describes (DESIGN: model file, `engine.json`, tokenizer, nothing else)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from engines.base import BLOCK, Engine, EngineSpec
from mtad.errors import InvalidInput

VERSION = 1
"""Of the layout of `engine.json` and `pair.json`; a reader refuses a newer one."""

MODEL_FILE = {"onnx": "model.onnx", "torch": "model.safetensors"}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a versioned description."""
    path.write_text(json.dumps({"version": VERSION, **values}, indent=2) + "\n", encoding="utf-8")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a versioned description; anything unusable is an `InvalidInput` that names the file."""
    path = folder / name
    if not folder.is_dir():
        raise InvalidInput("folder", str(folder), "no such folder; write one with mtad-export")
    if not path.is_file():
        raise InvalidInput("folder", str(folder), f"it has no {name}, so it was not written by mtad-export")
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = values.pop("version")
    except (ValueError, KeyError, AttributeError):
        raise InvalidInput(name, str(path), "not a valid description; export again") from None
    if version != VERSION:
        raise InvalidInput(
            f"{name} version",
            version,
            f"this package reads version {VERSION}; export again, or install the matching package",
        )
    return values


def write_spec(folder: Path, spec: EngineSpec) -> None:
    """Write `engine.json`."""
    write_json(folder / "engine.json", asdict(spec))


def read_spec(folder: Path) -> EngineSpec:
    """Read and check `engine.json`.

    Raises:
        InvalidInput: missing, malformed or newer description, or the model file is not there.
    """
    values = read_json(folder, "engine.json")
    names = {f.name for f in fields(EngineSpec)}
    if set(values) != names:
        wrong = sorted(set(values) ^ names)
        raise InvalidInput("engine.json", str(folder), f"fields missing or unknown: {', '.join(wrong)}; export again")
    spec = EngineSpec(**{**values, "eos_token_ids": tuple(values["eos_token_ids"])})
    if spec.format not in MODEL_FILE:
        raise InvalidInput("engine.json format", spec.format, f"known: {', '.join(MODEL_FILE)}; export again")
    if not (folder / MODEL_FILE[spec.format]).is_file():
        raise InvalidInput("folder", str(folder), f"{MODEL_FILE[spec.format]} is missing; export again")
    if spec.capacity % BLOCK or spec.capacity <= 0 or spec.rows <= 0:
        raise InvalidInput(
            "engine.json", str(folder), f"capacity must be a multiple of {BLOCK}, rows positive; export again"
        )
    return spec


def open_engine(folder: Path | str, threads: int = 1) -> Engine:
    """Open an engine folder of any format.

    Args:
        folder: what `mtad-export` wrote for one model.
        threads: CPU threads of this engine.

    Raises:
        InvalidInput: the folder is not a usable engine.
    """
    folder = Path(folder)
    spec = read_spec(folder)
    if spec.format == "torch":
        from engines.torch_engine import TorchEngine

        return TorchEngine(folder, spec)
    from engines.onnxruntime_engine import OnnxRuntimeEngine

    return OnnxRuntimeEngine(folder, spec, threads)


@contextlib.contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` only when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.incomplete-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        previous = folder.with_name(f".{folder.name}.previous-{os.getpid()}")
        if folder.exists():
            folder.rename(previous)
        temporary.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
