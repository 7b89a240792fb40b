"""Source code and prose every machine has: the standard library of the running Python, split by whole files."""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

# tests and generated tables repeat themselves; site-packages is not the standard library
_SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "lib2to3", "ensurepip"}
SHORTEST, LONGEST = 150, 1500
"""Characters of a function that is a document of its own."""


def split_of(module: str) -> str:
    """Split of a file by its path inside the library, for example "json/decoder.py"."""
    digest = hashlib.sha256(module.encode()).digest()[0]
    return "development" if digest < 13 else "test" if digest < 26 else "train"


def files(split: str) -> list[tuple[str, str]]:
    """(module path, text) of every standard library file of one split, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root)
        if _SKIPPED.isdisjoint(module.parts) and split_of(module.as_posix()) == split:
            found.append((module.as_posix(), path.read_text(encoding="utf-8", errors="replace")))
    return found


def functions(text: str) -> list[str]:
    """The functions and methods of a file, each a document of its own: without decorators, and not indented."""
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
    found = [
        textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip("\n") + "\n"
        for owner in owners
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [one for one in found if SHORTEST <= len(one) <= LONGEST]


def beginnings(texts: Sequence[str]) -> list[tuple[str, str]]:
    """(beginning, rest) of functions, cut at a line; the rest is what is left, 80 to 450 characters.

    A beginning has 150 to 350 characters, about 48 to 128 tokens.
    """
    cut = []
    for one in dict.fromkeys(one for text in texts for one in functions(text)):
        middle = one.find("\n", 150) + 1
        prompt, answer = one[:middle], one[middle:]
        if middle and len(prompt) <= 350 and 80 <= len(answer) <= 450:
            cut.append((prompt, answer))
    return cut


def windows(texts: Sequence[str], count: int, rng: random.Random) -> list[tuple[str, str]]:
    """`count` (prompt, continuation) pairs cut at line starts, spread over texts; fewer if these do not hold as many.

    A prompt has 200 to 350 characters (about 64 to 128 tokens), a continuation 400.
    """
    texts = [text for text in texts if len(text) > 2000]
    cut: list[tuple[str, str]] = []
    for _ in range(100 * count if texts else 0):
        text = texts[len(cut) % len(texts)]
        start = text.find("\n", rng.randrange(0, len(text) - 1200)) + 1
        middle = text.find("\n", start + rng.randrange(200, 280)) + 1
        prompt, answer = text[start:middle], text[middle : middle + 400]
        if start and 200 <= len(prompt) <= 350 and len(answer) == 400 and prompt.strip() and answer.strip():
            cut.append((prompt, answer))
        if len(cut) == count:
            break
    return cut
