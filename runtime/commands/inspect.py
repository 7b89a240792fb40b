"""`mtad inspect`: what an engine or pair folder is."""

from __future__ import annotations

import json
from pathlib import Path

from runtime.commands.entry import Parser, command


@command
def main() -> None:
    """Entry point of `mtad inspect`."""
    about = """Describe an engine or pair folder as a JSON object: model, sizes, files, memory, versions, hashes,
    defaults. It runs nothing."""
    parser = Parser(prog="mtad inspect", description=about)
    parser.add_argument("folder", type=Path, help="pair folder, or one of its engine folders")
    options = parser.parse_args()

    from engines.quiet import quiet_transformers
    from runtime.commands.inspect_folder import inspect

    quiet_transformers()
    print(json.dumps(inspect(options.folder), indent=2))
