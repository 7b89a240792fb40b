"""Python source of whatever packages a machine has, some packages held out whole.

A vendored copy (`pip/_vendor/requests`) belongs to the package it is a copy of. No text that is held out is also
trained on: files are told apart by what they hold, and windows with many lines of the training text are dropped.
"""

from __future__ import annotations

import hashlib
import random
import site
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtad.errors import InvalidInput
from scripts.demo import corpus

ROOTS = {"site-packages", "dist-packages", "_vendor", "_vendored", "vendor", "vendored", "third_party"}
"""Folders whose entries are packages, at any depth."""
SMALLEST, LARGEST = 200, 1_000_000
"""Bytes of a file: larger ones are tables that a program wrote."""
HELD_OUT = 26
"""Of 256 packages."""
GIANT = 0.05
"""Share of all text from which on a package is always trained on."""
LONG, FAMILIAR = 30, 0.25
"""Characters from which on a line counts, and share of such lines that a held-out window may have in common with the
training text: imports, licences and boilerplate."""


@dataclass(frozen=True)
class Sources:
    """Text of both sides, each once, and the names of the packages that are held out."""

    train: list[str]
    held_out: list[str]
    packages: list[str]


def folders() -> list[Path]:
    """The running Python's own library and its packages."""
    paths = sysconfig.get_paths()
    found = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return [path for path in map(Path, dict.fromkeys(found)) if path.is_dir()]


def package_of(path: Path) -> str:
    """The package of a file, by its path inside its folder: the name behind the last of `ROOTS`, or else the first."""
    parts = path.parts
    after = [at + 1 for at, part in enumerate(parts[:-1]) if part in ROOTS]
    return Path(parts[after[-1] if after else 0]).stem


def read(roots: Sequence[Path]) -> Sources:
    """All Python source of some folders.

    Raises:
        InvalidInput: a folder is missing, or one of the sides has no text.
    """
    texts: dict[str, tuple[str, str]] = {}  # by digest: package, text
    for root in roots:
        if not root.is_dir():
            raise InvalidInput("sources", str(root), "no such folder")
        for path in sorted(root.rglob("*.py")):
            data = path.read_bytes()
            if SMALLEST <= len(data) <= LARGEST:
                package = package_of(path.relative_to(root))
                text = data.decode("utf-8", errors="replace")
                texts.setdefault(hashlib.sha256(data).hexdigest(), (package, text))
    sizes: dict[str, int] = {}
    for package, text in texts.values():
        sizes[package] = sizes.get(package, 0) + len(text)
    most = GIANT * sum(sizes.values())
    chosen = {name for name, size in sizes.items() if size <= most and _digest(name) < HELD_OUT}
    train = [text for package, text in texts.values() if package not in chosen]
    held_out = [text for package, text in texts.values() if package in chosen]
    if not train or not held_out:
        problem = "not enough packages to train on some and hold out others; give more"
        raise InvalidInput("sources", ", ".join(map(str, roots)), problem)
    return Sources(train, held_out, sorted(chosen))


def windows(sources: Sources, count: int, seed: int) -> list[tuple[str, str]]:
    """Up to `count` (prompt, continuation) pairs of held-out text, see `corpus.windows`, that are new to the models."""
    rng = random.Random(seed)
    held_out = rng.sample(sources.held_out, len(sources.held_out))
    found = corpus.windows(held_out, 4 * count, rng)
    lines = [set(_lines(prompt + answer)) for prompt, answer in found]
    wanted = set().union(*lines)
    seen: set[str] = set()
    for text in sources.train:
        seen.update(wanted.intersection(_lines(text)))
    new = [pair for pair, own in zip(found, lines, strict=True) if len(own & seen) <= FAMILIAR * len(own)]
    return list(dict.fromkeys(new))[:count]


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= LONG]


def _digest(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0]
