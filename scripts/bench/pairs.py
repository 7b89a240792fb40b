"""The demo pair and copies that cost what larger pairs cost, as checkpoints and as exports; each is made once."""

from __future__ import annotations

from pathlib import Path

from engines.folder import write_folder
from export.checkpoint.find import find
from export.options import ExportOptions
from export.pair import export_pair
from runtime.pair import ROLES
from scripts.demo import inflate
from scripts.paths import DEMO, ROOT


def folder_of(size: str) -> Path:
    """Where all that is made of one size is kept. Its name changes with the demo pair."""
    digest = "".join(find(role, str(DEMO / "pair" / role)).digest[:6] for role in ROLES)
    return ROOT / "build" / "peers" / f"{size}-{digest}"


def checkpoints(size: str) -> Path:
    """The folder with `target` and `auxiliary`; `size` is `demo` or one of `inflate.SIZES`."""
    if size == "demo":
        return DEMO / "pair"
    folder = folder_of(size) / "checkpoints"
    if not folder.is_dir():
        with write_folder(folder) as new:
            for role, parameters in zip(ROLES, inflate.SIZES[size], strict=True):
                inflate.inflate(DEMO / "pair" / role, new / role, parameters)
    return folder


def exported(size: str, format: str = "onnx", precision: str | None = None) -> Path:
    """Our export, which is made anew where it is out of date."""
    folder, sources = folder_of(size) / f"pair-{precision or format}", [str(checkpoints(size) / role) for role in ROLES]
    export_pair(folder, ExportOptions(*sources, format=format, precision=precision), overwrite=True)
    return folder
