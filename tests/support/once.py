"""What all processes of a test run share: folders that the first one to ask for them writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Return `folder`, which `write` makes under another name if no process of this run has made it before."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            write(unfinished)
            unfinished.rename(folder)
    return folder
