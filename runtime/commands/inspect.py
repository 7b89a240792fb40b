"""`mtad inspect`: what an engine or pair folder is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines.memory import Memory, format_bytes
from mtad.errors import InvalidInput, no_folder
from runtime.commands.entry import Parser, command


@command
def main() -> None:
    """Entry point of `mtad inspect`."""
    parser = Parser(
        prog="mtad inspect",
        description="Describe an engine or pair folder: model, sizes, operators, files, memory, "
        "versions, hashes, tuned defaults. It runs nothing.",
    )
    parser.add_argument("folder", type=Path, help="pair folder, or one of its engine folders")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not options.folder.is_dir():
        raise InvalidInput("folder", str(options.folder), f"{no_folder(options.folder)}; mtad export writes one")
    if not any((options.folder / name).is_file() for name in ("pair.json", "engine.json")):
        problem = "it has no pair.json and no engine.json: not written by mtad export"
        raise InvalidInput("folder", str(options.folder), problem)

    from engines.quiet import quiet_transformers
    from runtime.commands.inspect_folder import inspect

    quiet_transformers()
    found = inspect(options.folder)
    print(json.dumps(found) if options.json else "\n".join(describe(found)))


def describe(found: dict[str, Any]) -> list[str]:
    """What `inspect` found, as lines for people."""
    if found["kind"] == "engine":
        return _table(found["folder"], _engine(found))
    memory = {name: value for name, value in found["memory"].items() if name != "total"}
    rows = [
        ("vocabulary", f"{found['vocab_size']} tokens, {found['vocabulary_hash'][:16]}"),
        ("defaults", json.dumps(found["defaults"]) if found["defaults"] else "the package's"),
        ("tuned", "yes" if found["tuned"] else "no"),
        ("memory", str(Memory(**memory)).removeprefix("memory: ")),
    ]
    lines = _table(f"{found['folder']} (pair)", rows)
    for name, engine in found["engines"].items():
        lines += ["", *_table(name, _engine(engine))]
    return lines


def _engine(found: dict[str, Any]) -> list[tuple[str, str]]:
    padding = found["vocab_size"] - found["vocabulary"]
    ends = ", ".join(f"{token!r} ({id})" for token, id in zip(found["eos_tokens"], found["eos_token_ids"], strict=True))
    cache = f"{found['layers']} layers x {found['kv_heads']} KV heads x {found['head_dim']}"
    held = f"{format_bytes(found['kv_bytes_row'])} per row, {format_bytes(found['kv_bytes'])} in all"
    rows = [
        ("model", f"{found['architecture']}, {cache}"),
        ("engine", f"{found['format']}, {found['dtype']}, {found['rows']} rows x {found['capacity']} columns"),
        ("vocabulary", f"{found['vocabulary']} tokens, logits padded by {padding}; ends: {ends or 'none'}"),
        ("KV cache", f"{held}, in {found['dtype']}"),
        ("files", ", ".join(f"{name} {format_bytes(size)}" for name, size in found["files"].items())),
        ("size", format_bytes(found["size"])),
    ]
    if found["operators"] is not None:
        opsets = ", ".join(f"{domain} {version}" for domain, version in found["opsets"].items())
        counts = ", ".join(f"{name} {count}" for name, count in found["operators"].items())
        rows.append(("operators", f"{sum(found['operators'].values())} ({opsets}): {counts}"))
    rows += [
        ("exported by", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("from", f"{found['source'] or 'unknown'}, {found['checkpoint_hash'][:16]}"),
        ("build", found["build_hash"][:16] or "unknown"),
    ]
    others = {name: found[name] for name in ("attention", "plan", "precision") if found[name] is not None}
    return [*rows, *((name, json.dumps(value)) for name, value in others.items())]


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [title, *(f"  {name:{width}}  {value}" for name, value in rows)]
