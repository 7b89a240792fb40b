"""What an engine or pair folder is, as plain values; nothing is opened to run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.base import EngineSpec
from engines.folder import read_spec, vocabulary_hash
from engines.memory import Memory
from runtime.config import RuntimeConfig
from runtime.pair import open_tokenizer, read_defaults, read_description


def inspect(folder: Path) -> dict[str, Any]:
    """Describe a pair or an engine of `mtad export`."""
    return _pair(folder) if (folder / "pair.json").exists() else _engine(folder, read_spec(folder))


def _pair(folder: Path) -> dict[str, Any]:
    values = read_description(folder)
    vocabularies = {"target": values["vocabulary_hash"], "auxiliary": values["auxiliary_vocabulary_hash"]}
    read_defaults(defaults := values["defaults"] | values["tuned"])
    specs = {name: read_spec(folder / name) for name in values["engines"]}
    engines = {name: _engine(folder / name, spec, vocabularies[name]) for name, spec in specs.items()}
    target, auxiliary = specs["target"], specs.get("auxiliary", specs["target"].without_layers)
    weights = sum(file.stat().st_size for name in specs for file in (folder / name).glob("model*"))
    config = RuntimeConfig()
    memory = Memory.of(target, auxiliary, weights, config.nodes + 1, config.prefix_columns(target.capacity))
    return {
        "kind": "pair",
        "folder": str(folder),
        "vocab_size": values["vocab_size"],
        "vocabulary_hash": values["vocabulary_hash"],
        "shared_tokens": values.get("shared_tokens", values["vocab_size"]),
        "defaults": defaults,
        "tuned": "tuning" in values,
        "memory": {**asdict(memory), "total": memory.total},
        "engines": engines,
    }


def _engine(folder: Path, spec: EngineSpec, vocabulary: str | None = None) -> dict[str, Any]:
    tokenizer = open_tokenizer(folder, vocabulary)
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    text = tokenizer.get_vocab()
    return {
        "kind": "engine",
        "folder": str(folder),
        **asdict(spec),
        "eos_token_ids": list(spec.eos_token_ids),
        "vocabulary": len(text),
        "vocabulary_hash": vocabulary_hash(text),
        "eos_tokens": [tokenizer.convert_ids_to_tokens(token) for token in spec.eos_token_ids],
        "kv_bytes": spec.kv_bytes,
        "files": files,
        "size": sum(files.values()),
    }
