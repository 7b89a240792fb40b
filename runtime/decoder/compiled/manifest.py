"""A folder of compiled functions of `mtad`, and the proof that they are those of this version of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import mtad
from engines.folder import read_json, write_json
from mtad.errors import InvalidInput
from mtad.methods import Form, Rule

SOURCES = (
    "block",
    "distributions/candidates",
    "draft/levels",
    "draft/tree",
    "ops",
    "rows",
    "rules/accept",
    "rules/chain",
    "rules/joint",
    "rules/scored",
)
"""Modules of `mtad` that the functions are made of."""
EAGER: tuple[Rule, ...] = ("greedy_multi_path", "traversal", "recursive_rejection", "beams")
"""Acceptance rules that are not compiled: they take as many rounds as a node has children, or a row has levels."""
COMPILED: tuple[Rule, ...] = tuple(rule for rule in get_args(Rule) if rule not in EAGER)
"""Acceptance rules that are compiled."""
ARGUMENT = "argument_"
"""An input's name is this and its number among the function's tensors; those that it does not use are left out."""
GRAPHS = Path(__file__).parent / "graphs"
"""The compiled functions, part of the package; `python -m runtime.decoder.compiled.compile` writes them."""
REMEDY = "run python -m runtime.decoder.compiled.compile"


def grow_kind(forms: Sequence[Form], beams: int) -> str:
    """Which of the compiled `grow` draws levels of drafts of these forms, below `beams` slots."""
    if tuple(forms) == ("chain",):
        return "chain"
    kind = "branches" if "branches" in forms else "mixed" if "chain" in forms else "beams"
    return f"{kind}_first" if beams == 1 else kind


def sources_hash() -> str:
    """Sha256 over the sources of the compiled modules."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(mtad.__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()


def write_manifest(folder: Path, names: list[str], versions: dict[str, str]) -> None:
    """Write `graphs.json`, which says what the graphs were compiled from."""
    values = {"sources": sources_hash(), "graphs": sorted(names), "versions": versions}
    write_json(folder / "graphs.json", values)


def read_graphs(folder: Path) -> dict[str, Path]:
    """The files of the compiled functions, by name.

    Raises:
        InvalidInput: it is missing, incomplete, or was made from other sources.
    """
    try:
        values = read_json(folder, "graphs.json")
    except InvalidInput as error:
        raise InvalidInput("graphs", str(folder), f"the compiled functions cannot be read; {REMEDY}") from error
    if values.get("sources") != sources_hash():
        raise InvalidInput("graphs", str(folder), f"they were not compiled from this version of mtad; {REMEDY}")
    paths = {name: folder / f"{name}.onnx" for name in values.get("graphs", ())}
    if missing := sorted(name for name, path in paths.items() if not path.is_file()):
        raise InvalidInput("graphs", str(folder), f"{', '.join(missing)} missing; {REMEDY}")
    return paths
