"""A model directory in a Triton model repository: `config.pbtxt`, `1/model.py`, `1/model.yaml`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import yaml

from engines.folder import write_folder
from mtad.errors import InvalidInput
from runtime.triton.options import TritonOptions
from runtime.triton.tensors import INPUTS, OUTPUTS, TritonTensor

_MODEL = '''"""Written by mtad triton. Options are in model.yaml; docs/triton.md describes them."""

from runtime.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_PAIR = "pair"


def write_model(
    repository: Path,
    name: str,
    options: TritonOptions,
    environment: str | None = None,
    copy: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the directory of one model, whole or not at all.

    Args:
        repository: folder of models; made if it is missing.
        options: of the model; `pair` is the pair folder as seen from here.
        environment: virtual environment that Triton is to run the model in; None takes Triton's own Python.
        copy: put a copy of the pair into the directory, so that it can be moved as a whole.
        overwrite: replace an earlier directory.

    Returns:
        the directory.

    Raises:
        InvalidInput: the name or the pair is not usable, or the directory exists and may not be replaced.
    """
    if not name or not all(letter.isalnum() or letter in "._-" for letter in name) or name[0] in ".-":
        raise InvalidInput("model", name, "give letters, digits, dots, dashes and underscores")
    pair = Path(options.pair).absolute()
    if not (pair / "pair.json").is_file():
        raise InvalidInput("pair", str(options.pair), "no such pair folder; mtad export writes them")
    if environment is not None and not Path(environment, "bin", "activate").is_file():
        raise InvalidInput("environment", environment, "not a virtual environment: bin/activate is missing")
    repository, folder = repository.absolute(), (repository / name).resolve()
    if pair == folder or pair in folder.parents:
        raise InvalidInput("repository", str(repository), "lies inside the pair folder; give another place")
    if folder in pair.resolve().parents and not copy:
        raise InvalidInput("pair", str(pair), "lies in the directory that is replaced; give --copy")
    if folder.exists() and not (overwrite and (folder / "1" / "model.yaml").is_file()):
        problem = "exists; give another --model, or --overwrite for what mtad triton wrote"
        raise InvalidInput("repository", str(folder), problem)
    values = asdict(options) | {"pair": _PAIR if copy else str(pair)}
    with write_folder(folder) as temporary:
        (temporary / "config.pbtxt").write_text(config(name, environment), encoding="utf-8")
        version = temporary / "1"
        version.mkdir()
        (version / "model.py").write_text(_MODEL, encoding="utf-8")
        header = "# Options of the model: those of RuntimeConfig, and the model's own. Written by mtad triton.\n"
        (version / "model.yaml").write_text(header + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        if copy:
            shutil.copytree(pair, version / _PAIR)
    return folder


def config(name: str, environment: str | None = None) -> str:
    """The text of a model's `config.pbtxt`; `environment` is the virtual environment it runs in."""
    lines = [
        "# Written by mtad triton; docs/triton.md describes the tensors.",
        f'name: "{name}"',
        'backend: "python"',
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        *_block("input", INPUTS, optional=True),
        *_block("output", OUTPUTS, optional=False),
        "# one process; it batches requests itself, and its engines choose their device",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]
    if environment is not None:
        path = json.dumps(str(Path(environment).absolute()))
        lines.append(f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: {path} }} }}')
    return "\n".join(lines) + "\n"


def _block(kind: str, tensors: Iterable[TritonTensor], optional: bool) -> list[str]:
    tail = " optional: true" if optional else ""
    rows = [
        f'  {{ name: "{one.name}" data_type: TYPE_{one.type} dims: [ {", ".join(map(str, one.dims))} ]{tail} }}'
        for one in tensors
    ]
    return [f"{kind} [", ",\n".join(rows), "]"]
