"""What an engine is a function of, as one hash: an engine is built again when it changes, and only then.

It covers the checkpoint's content, the options, the tokenizer's files, the versions of the packages and the code that
makes engines. The code counts by its sources, not by a number that has to be raised by hand: forgetting to raise one
keeps a wrong engine, while a hash that changes without need costs an export. Comments, docstrings and layout do not
count. A new module of `export/` counts from its first day, unless it is named here as one that writes no engine.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engines.base import EngineSpec

WRITES_NO_ENGINE = frozenset(
    ("__init__", "build", "check", "check_command", "command", "estimate", "functions", "layers", "unfinished")
)
"""Modules of `export/` that can change without any engine changing."""


def build_hash(spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, measured_on: str = "") -> str:
    """Sha256 over all that decides what is in an engine folder; where its checkpoint was does not.

    Args:
        spec, tokenizer: of the engine.
        measured_on: hash of the text that a quantised engine's report is of.
    """
    values = {name: value for name, value in asdict(spec).items() if name not in ("source", "build_hash")}
    return _sha256([json.dumps(values, sort_keys=True), exporter_hash(), _tokenizer_hash(tokenizer), measured_on])


@lru_cache(maxsize=1)
def exporter_hash() -> str:
    """Sha256 over the code that makes engines."""
    here = Path(__file__).parent
    modules = [path for path in sorted(here.glob("*.py")) if path.stem not in WRITES_NO_ENGINE]
    sources = [*modules, *(here.parent / "engines" / name for name in ("base.py", "hook.py"))]
    return _sha256(f"{path.stem} {code_of(path.read_text(encoding='utf-8'))}" for path in sources)


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
