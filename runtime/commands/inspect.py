"""`mtad inspect`: what an engine or pair folder is."""

from __future__ import annotations

import json
from pathlib import Path

from mtad.errors import InvalidInput, no_folder
from runtime.commands.entry import Parser, command


@command
def main() -> None:
    """Entry point of `mtad inspect`."""
    parser = Parser(
        prog="mtad inspect",
        description="Describe an engine or pair folder as a JSON object: model, sizes, files, memory, versions, "
        "hashes, defaults. It runs nothing.",
    )
    parser.add_argument("folder", type=Path, help="pair folder, or one of its engine folders")
    options = parser.parse_args()
    if not options.folder.is_dir():
        raise InvalidInput("folder", str(options.folder), f"{no_folder(options.folder)}; mtad export writes one")
    if not any((options.folder / name).is_file() for name in ("pair.json", "engine.json")):
        problem = "it has no pair.json and no engine.json: not written by mtad export"
        raise InvalidInput("folder", str(options.folder), problem)

    from engines.quiet import quiet_transformers
    from runtime.commands.inspect_folder import inspect

    quiet_transformers()
    print(json.dumps(inspect(options.folder), indent=2))
