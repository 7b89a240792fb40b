"""Exports of the small pair, in the format that is written fastest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.once import once

OPTIONS: dict[str, Any] = {"rows": 2, "capacity": 128, "format": "torch"}


@pytest.fixture
def checkpoint(checkpoints: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the target's checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoints[0], tmp_path / "checkpoint"))


@pytest.fixture
def stages() -> list[str]:
    """What the last export did."""
    return []


@pytest.fixture
def export(checkpoints: tuple[Path, Path], tmp_path: Path, stages: list[str]) -> Callable[..., bool]:
    """Export the pair to `tmp_path`/pair; keywords override."""
    from export.options import ExportOptions
    from export.pair import export_pair

    def run(folder: Path = tmp_path / "pair", overwrite: bool = False, **changes: Any) -> bool:
        target, auxiliary = map(str, checkpoints)
        stages.clear()
        asked = ExportOptions(**{**OPTIONS, "target": target, "auxiliary": auxiliary, **changes})
        return export_pair(folder, asked, overwrite, stages.append)

    return run


@pytest.fixture
def exported(export: Callable[..., bool], shared: Path, tmp_path: Path) -> Path:
    """`tmp_path`/pair, as `export` has made it once for all tests."""
    return Path(shutil.copytree(once(shared / "quick-pair", export), tmp_path / "pair"))
