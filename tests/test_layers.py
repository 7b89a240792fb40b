"""Imports only point down: from package to package, and within `mtad` from room to room.

Scripts and tests do not know each other, but for the scripts' own tests.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter

import pytest

import mtad
from runtime.llm import LLM
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
UPWARDS = {("mtad/__init__", f"runtime/{name}") for name in ("llm", "async_llm", "config")}
"""The one exception, made when a name is used: `from mtad import LLM`, for programs that use the package."""


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
    assert set(imports()) >= UPWARDS
    for module, other in set(imports()) - UPWARDS:
        assert layer(other) in {"", *BELOW[layer(module)]}, f"{module} imports {other}"


def test_programs_begin_with_one_import() -> None:
    assert mtad.LLM is LLM
    with pytest.raises(AttributeError):
        mtad.Nothing  # noqa: B018


@pytest.mark.parametrize(
    ("modules", "late"),
    [
        ("scheduler.scheduler, runtime.scheduler.statistics, runtime.speculation.planner", {"torch", "transformers"}),
        ("commands.main", {"numba"}),
        ("llm, runtime.server.app, runtime.commands.inspect_folder", {"transformers.modeling_utils"}),
    ],
)
def test_what_takes_long_to_import_is_not_imported_before_it_is_needed(modules: str, late: set[str]) -> None:
    """Transformers' models take longer to import than an engine without them takes to open."""
    code = f"import sys, mtad, runtime.{modules}; sys.exit(bool({late!r} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_rooms_of_mtad_do_not_import_each_other_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for module, other in imports():
        here, there = (name.split("/")[:2] for name in (module, other))
        if here != there and here[0] == there[0] == "mtad" and len(there) == 2:
            rooms.setdefault(here[1], set()).add(there[1])
    assert "rules" in list(TopologicalSorter(rooms).static_order())
