"""Where measurements are kept while they are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Store:
    """What was measured so far, one JSON object per line: an interrupted run goes on where it ended.

    Attributes:
        rows: all objects, the oldest first.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.rows = path, list[dict[str, Any]]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self.rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def add(self, **row: Any) -> None:
        """Keep one more."""
        self.rows.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(row), file=file)

    def has(self, **row: Any) -> bool:
        """Whether there is one with these values."""
        return any(row.items() <= one.items() for one in self.rows if one.keys() >= row.keys())
