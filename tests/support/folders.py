"""What lies in a folder, and descriptions that are changed in place."""

from __future__ import annotations

import json
from pathlib import Path


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
