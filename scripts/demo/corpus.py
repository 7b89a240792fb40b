"""Source code every machine has: the standard library of the running Python, split by whole files."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path

# tests and generated tables repeat themselves; site-packages is not the standard library
_SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib2to3", "ensurepip"}
SHORTEST, LONGEST = 150, 1500
"""Characters of a function that is a document of its own."""


def split_of(module: str) -> str:
    """Split of a file by its path inside the library, for example "json/decoder.py"."""
    digest = hashlib.sha256(module.encode()).digest()[0]
    return "development" if digest < 13 else "test" if digest < 26 else "train"


def files(split: str) -> list[str]:
    """Text of every standard library file of one split, sorted by path."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root)
        if _SKIPPED.isdisjoint(module.parts) and split_of(module.as_posix()) == split:
            found.append(path.read_text(encoding="utf-8", errors="replace"))
    return found


def functions(texts: Iterable[str]) -> list[str]:
    """The functions and methods of files, each once, without decorators, and not indented."""
    return list(dict.fromkeys(one for text in texts for one in _functions(text) if SHORTEST <= len(one) <= LONGEST))


def _functions(text: str) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.splitlines(keepends=True)
    owners: list[ast.Module | ast.ClassDef] = [
        module,
        *(node for node in module.body if isinstance(node, ast.ClassDef)),
    ]
    return [
        textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip("\n") + "\n"
        for owner in owners
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def beginnings(texts: Iterable[str]) -> list[tuple[str, str]]:
    """(beginning, rest) of functions, cut at a line: 150 to 350 characters, about 48 to 128 tokens, and 80 to 450."""
    found = []
    for one in functions(texts):
        middle = one.find("\n", 150) + 1
        if middle and middle <= 350 and 80 <= len(one) - middle <= 450:
            found.append((one[:middle], one[middle:]))
    return found
