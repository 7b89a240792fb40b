"""Engine folders: a model file, the `engine.json` that describes it, a tokenizer, nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from engines.base import KV_PAGE, Engine, EngineSpec, input_shapes
from engines.kinds import ATTENTION, FORMATS, PRECISIONS
from engines.memory import format_bytes
from engines.placement import ONE_CORE, Placement
from mtad.errors import Failed, InvalidInput, no_folder, refused_as

VERSION = 1
"""Version of the layout of `engine.json` and `pair.json`; a reader refuses any other."""


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a versioned description, in one step: a reader never sees half of it.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    text = json.dumps({"version": VERSION, **values}, indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.incomplete-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a versioned description; anything unusable is an `InvalidInput` that names the file."""
    path = folder / name
    if not folder.is_dir():
        raise InvalidInput("folder", str(folder), f"{no_folder(folder)}; write one with mtad export")
    if not path.is_file():
        raise InvalidInput("folder", str(folder), f"it has no {name}; write one with mtad export")
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = values.pop("version")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise InvalidInput(name, str(path), "not a valid description; export again") from None
    if version != VERSION:
        problem = f"this package reads version {VERSION}; export again, or install the matching package"
        raise InvalidInput(f"{name} version", version, problem)
    return values


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """Sha256 over the tokens of a tokenizer in the order of their ids."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items(), key=lambda item: item[1])).encode()).hexdigest()


def write_spec(folder: Path, spec: EngineSpec) -> None:
    """Write `engine.json`."""
    write_json(folder / "engine.json", asdict(spec))


def read_spec(folder: Path) -> EngineSpec:
    """Read and check `engine.json`.

    Raises:
        InvalidInput: missing, malformed or newer description, or the model file is not there.
    """
    from pydantic import TypeAdapter, ValidationError  # which a GPU's machine may lack

    values = read_json(folder, "engine.json")
    if wrong := sorted(values.keys() ^ {field.name for field in fields(EngineSpec)}):
        raise InvalidInput("engine.json", str(folder), f"fields missing or unknown: {', '.join(wrong)}; export again")
    try:
        spec = TypeAdapter(EngineSpec).validate_json(json.dumps(values), strict=True)
    except ValidationError as found:
        error = found.errors()[0]
        field = " ".join(map(str, ("engine.json", *error["loc"])))
        raise InvalidInput(field, error["input"], f"{error['msg'].lower()}; export again") from None
    for name, value in (values | (values["plan"] or {})).items():
        if type(value) is int and value < 1:
            raise InvalidInput(f"engine.json {name}", value, "not positive; export again")
    if spec.capacity % KV_PAGE:
        raise InvalidInput("engine.json capacity", spec.capacity, f"not a multiple of {KV_PAGE}; export again")
    for name, known in (("format", FORMATS), ("precision", PRECISIONS), ("attention", ATTENTION)):
        if values[name] not in known:
            raise InvalidInput(f"engine.json {name}", values[name], f"known: {', '.join(known)}; export again")
    if spec.dtype != PRECISIONS[spec.precision]:
        raise InvalidInput("engine.json dtype", spec.dtype, f"not that of precision {spec.precision}; export again")
    format = FORMATS[spec.format]
    if (spec.plan is not None) != (format.stored == "plan"):
        raise InvalidInput("engine.json plan", values["plan"], f"unlike the format {spec.format}; export again")
    for file in format.files:
        if not (folder / file).is_file():
            raise InvalidInput("folder", str(folder), f"{file} is missing; export again")
    return spec


def open_engine(folder: Path | str, placement: Placement = ONE_CORE, rows: int | None = None) -> Engine:
    """Open an engine folder of any format.

    Args:
        rows: rows of its cache; default: what `engine.json` says.

    Raises:
        InvalidInput: the folder is not a usable engine, or does not run there.
    """
    folder = Path(folder)
    spec = read_spec(folder)
    return open_model(folder, spec if rows is None else replace(spec, rows=rows), placement)


def open_model(folder: Path, spec: EngineSpec, placement: Placement = ONE_CORE) -> Engine:
    """Open the model files of a folder that has no `engine.json` yet; see `open_engine`.

    Raises:
        InvalidInput: they are damaged, or do not run there.
    """
    kind = placement.check(spec)
    with refused_as("folder", str(folder), "the model cannot be opened; if it is damaged, delete it and export again"):
        if kind.stored == "graph":
            _check_graph(folder / "model.onnx", spec)
        try:
            return kind.open(folder, spec, placement)
        except MemoryError as error:
            raise InvalidInput("rows", spec.rows, f"{error}; give fewer, or --memory for as much as fits") from error


def _check_graph(path: Path, spec: EngineSpec) -> None:
    """Refuse a graph with other shapes than a description says: memory of other sizes would be bound to it."""
    import onnx  # which a folder of another kind is opened without

    graph = onnx.load(path, load_external_data=False).graph
    values = [*graph.input, *(value for value in graph.output if value.name == "logits")]
    found = {v.name: tuple(dim.dim_param or dim.dim_value for dim in v.type.tensor_type.shape.dim) for v in values}
    wanted = input_shapes(spec, "rows", "steps", "length", "kept") | {"logits": ("rows", "kept", spec.vocab_size)}
    for name in sorted(found.keys() | wanted.keys()):
        if (there := found.get(name)) != (said := wanted.get(name)):
            problem = f"it says that the graph's {name} has the shape {said}, and it has {there}; export again"
            raise InvalidInput("engine.json", str(path.parent), problem)


@contextlib.contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, whose name and place it takes when the block ends without an error.

    Raises:
        InvalidInput: nothing can be written there.
        Failed: writing broke off.
    """
    temporary, previous = (folder.with_name(f".{folder.name}.{kind}-{os.getpid()}") for kind in ("incomplete", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise InvalidInput("folder", str(folder), f"cannot be written: {error}") from None
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # its content is on the disk before the folder has its name
        if folder.exists():
            folder.rename(previous)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:  # of a full disk, libraries only say that they wrote less
        free = f"{format_bytes(shutil.disk_usage(folder.parent).free)} of the disk are free"
        raise Failed(f"{folder} cannot be written, nothing is left of it: {error} ({free})") from error
    finally:
        if previous.exists() and not folder.exists():
            previous.rename(folder)
        for left in (temporary, previous):
            shutil.rmtree(left, ignore_errors=True)


def cache_folder() -> Path:
    """The user's cache folder of this package: `$MTAD_CACHE`, else `$XDG_CACHE_HOME/mtad`, else `~/.cache/mtad`."""
    own = os.environ.get("MTAD_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtad"
