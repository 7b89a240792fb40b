"""What an engine is a function of, as one hash: an engine is built again when it changes, and only then.

It covers the checkpoint's content, the options, the tokenizer's files, the versions of the packages and the code that
makes engines. The code counts by its sources, without comments, docstrings and layout: a version number would have to
be raised by hand, and forgetting that would keep a wrong engine. A new module of `export/` counts, unless it is named
here as one that writes no engine.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

import engines.base
import engines.pytorch.fixed_cache
import engines.pytorch.fused_layers
import engines.pytorch.hook
import export
from engines.base import EngineSpec

WRITES_NO_ENGINE = ("build_hash.py", "estimate.py", "staging.py", "verification/check.py", "verification/layers.py")
"""Modules and folders of `export/` that can change without any engine changing."""

TRACED = (engines.base, engines.pytorch.fixed_cache, engines.pytorch.fused_layers, engines.pytorch.hook)
"""Modules of other packages whose code becomes part of a graph, or decides its shapes."""


def build_hash(spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, measured_on: str = "") -> str:
    """Sha256 over all that decides what is in an engine folder; where its checkpoint was does not.

    Args:
        measured_on: hash of the text that a quantised engine's report is of.
    """
    values = {name: value for name, value in asdict(spec).items() if name not in ("source", "build_hash")}
    return _sha256([json.dumps(values, sort_keys=True), exporter_hash(), _tokenizer_hash(tokenizer), measured_on])


@lru_cache(maxsize=1)
def exporter_hash() -> str:
    """Sha256 over the code that makes engines."""
    return hash_of(engine_sources())


def engine_sources() -> dict[str, str]:
    """The text of every module that decides what is in an engine, by its path from the package's parent."""
    home = Path(export.__file__).parent
    paths = [path for path in home.rglob("*.py") if path.name != "__init__.py"]
    counted = [path for path in paths if not path.relative_to(home).as_posix().startswith(WRITES_NO_ENGINE)]
    counted += [Path(str(module.__file__)) for module in TRACED]
    return {path.relative_to(home.parent).as_posix(): path.read_text(encoding="utf-8") for path in sorted(counted)}


def hash_of(sources: Mapping[str, str]) -> str:
    """Sha256 over the code of modules, see `code_of`."""
    return _sha256(f"{name} {code_of(text)}" for name, text in sources.items())


def code_of(source: str) -> str:
    """A module's code without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):  # a lambda's is an expression
            texts = (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in body)
            node.body = [one for one, text in zip(body, texts, strict=True) if not text]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return _sha256(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files)


def _sha256(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()
