"""Imports only point down: from package to package, and within `mtad` from room to room.

Scripts and tests do not know each other, but for the scripts' own tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter

from tests.support.paths import ROOT

ENGINES = {"mtad", "engines"}
ALL = {*ENGINES, "export", "runtime", "runtime/commands"}
BELOW = {
    "mtad": {"mtad"},
    "engines": ENGINES,
    "export": {*ENGINES, "export"},
    "runtime": {*ENGINES, "runtime"},
    "runtime/commands": ALL,
    "scripts": {*ALL, "scripts"},
    "tests": {*ALL, "tests"},
    "tests/scripts": {*ALL, "tests", "tests/scripts", "scripts"},
}
"""What the modules of a folder may import of ours; the longest name that fits a module counts."""


def layer(module: str) -> str:
    """The folder that a module belongs to; empty for a module that is not ours."""
    return max((name for name in BELOW if f"{module}/".startswith(f"{name}/")), key=len, default="")


@cache
def imports() -> list[tuple[str, str]]:
    """Every import of one of our modules by another, also one inside a function: the two names, parts joined by /."""
    found = []
    for package in {name.split("/")[0] for name in BELOW}:
        for path in (ROOT / package).rglob("*.py"):
            module = path.relative_to(ROOT).with_suffix("").as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                found += [(module, name.replace(".", "/")) for name in names]
    return found


def test_a_package_imports_only_what_lies_below_it() -> None:
    for module, other in imports():
        assert layer(other) in {"", *BELOW[layer(module)]}, f"{module} imports {other}"


def imported_at_once(*modules: str) -> Iterator[tuple[str, str]]:
    """What importing modules of ours imports, with what that imports in turn: where from, parts joined by /, and what.

    Not what is imported inside a function, nor for type checkers.
    """
    waiting, known = [*modules], {*modules}
    while waiting:
        path = ROOT / waiting.pop()
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                source = node.module.replace(".", "/")
                for name in node.names:
                    yield source, name.name
                    for other in (source, f"{source}/{name.name}"):
                        if other not in known and (ROOT / other).with_suffix(".py").exists() | (ROOT / other).is_dir():
                            known.add(other)
                            waiting.append(other)


def test_opening_a_pair_imports_no_model_before_an_engine_needs_it() -> None:
    """Transformers' models take longer to import than an engine without them takes to open."""
    found = set(
        imported_at_once("runtime/llm", "runtime/server/app", "runtime/commands/inspect_folder", "engines/quiet")
    )
    assert ("engines/folder", "read_spec") in found
    assert {name for source, name in found if source.startswith("transformers")} == {
        "AutoTokenizer",
        "PreTrainedTokenizerBase",
    }


def test_the_rooms_of_mtad_do_not_import_each_other_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for module, other in imports():
        here, there = (name.split("/")[:2] for name in (module, other))
        if here != there and here[0] == there[0] == "mtad" and len(there) == 2:
            rooms.setdefault(here[1], set()).add(there[1])
    assert "rules" in list(TopologicalSorter(rooms).static_order())
