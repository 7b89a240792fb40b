"""The pair of a command: a pair folder, or checkpoints that are exported into the user's cache first."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock

from export.options import ADAPTER, GGUF, ExportOptions
from mtad.errors import CapacityExceeded, InvalidInput, no_folder
from runtime.commands.entry import add_options, given_options
from runtime.commands.terminal import waiting
from runtime.config import RuntimeConfig

EXPORT_OPTIONS = ("capacity", "precision", "revision", "auxiliary_revision")
"""Options of an export that a command takes along with a checkpoint."""


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add the pair and, for a pair that has yet to be exported, its auxiliary and options of the export."""
    parser.add_argument("pair", help="pair folder, or the target's checkpoint: a folder, a hub id or a GGUF file")
    group = parser.add_argument_group("exporting first", "only with a checkpoint; the pair is kept in the user's cache")
    group.add_argument("--auxiliary", help="its auxiliary's checkpoint, likewise (default: drafts are looked up)")
    add_options(group, ExportOptions, only=EXPORT_OPTIONS)


def find_pair(options: argparse.Namespace) -> Path:
    """The pair folder that the command line names, exported now if need be. Bad folders are refused without torch.

    Raises:
        InvalidInput: it is no pair folder that a command can open, or a checkpoint cannot be exported.
    """
    given = given_options(options, ExportOptions, EXPORT_OPTIONS)
    folder = Path(options.pair)
    is_pair = (folder / "pair.json").is_file()
    if is_pair and options.auxiliary is None:
        for name in given:
            raise InvalidInput(name, given[name], "only with a checkpoint; a pair folder was exported with its own")
        return folder
    if is_pair:
        raise InvalidInput("auxiliary", options.auxiliary, "leave it out; the first argument is already a pair folder")
    if options.auxiliary is not None or _is_checkpoint(folder):
        return _exported(options.pair, options.auxiliary, given)
    if not folder.is_dir():
        raise InvalidInput("pair", str(folder), f"{no_folder(folder)}; mtad export writes one")
    problem = "it has no pair.json: not written by mtad export"
    if (folder / "engine.json").is_file() and (folder.parent / "pair.json").is_file():
        problem = f"one engine of a pair; give {folder.parent}"
    elif inside := sorted(str(file.parent) for file in folder.glob("*/pair.json")):
        problem = f"it holds pairs; give one of {', '.join(inside[:10])}"
    raise InvalidInput("pair", str(folder), problem)


def _is_checkpoint(source: Path) -> bool:
    """Whether it is a checkpoint's folder or file, or a hub id: a path whose first part is no folder here."""
    if source.is_dir():
        known = any((source / name).is_file() for name in ("config.json", ADAPTER))
        return known and not (source / "engine.json").is_file()
    if source.is_file():
        return source.suffix == GGUF
    return len(source.parts) == 2 and source.parts[0] not in ("..", "~", "/") and not source.parent.exists()


def check_room(folder: Path, config: RuntimeConfig, max_tokens: int | None) -> None:
    """Refuse, without torch, more new tokens than a row of a pair has room for.

    Raises:
        CapacityExceeded: they do not fit behind even the shortest prompt.
    """
    try:
        capacity = json.loads((folder / "target" / "engine.json").read_text(encoding="utf-8"))["capacity"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return  # opening the pair says what is wrong
    if isinstance(capacity, int) and 0 < capacity - config.nodes <= (max_tokens or 0):  # else drafts are too long
        problem = f"prompt and new tokens must fit in {capacity - config.nodes}, what a row of the pair has room for"
        raise CapacityExceeded("max_tokens", max_tokens, f"{problem}; give fewer, or export with a larger --capacity")


def _exported(target: str, auxiliary: str | None, given: dict[str, Any]) -> Path:
    """The cached pair of checkpoints; exported again where they, the options or the exporter have changed."""
    with waiting("loading PyTorch and transformers"):
        from engines.folder import cache_folder
        from engines.quiet import quiet_transformers
        from export.pair import export_pair

        quiet_transformers()
    sources = [str(Path(s).resolve()) if Path(s).exists() else s for s in (target, auxiliary) if s is not None]
    digest = hashlib.sha256(json.dumps([sources, given], sort_keys=True).encode()).hexdigest()[:12]
    name = "+".join(re.sub(r"[^\w.-]+", "-", Path(source).name) for source in sources)
    folder = cache_folder() / "pairs" / f"{name}-{digest}"

    with nullcontext() if (folder / "pair.json").exists() else FileLock(f"{folder}.lock"):  # others find it done
        export_pair(folder, ExportOptions(target, auxiliary, **given), overwrite=True, progress=print_stage)
    print(f"pair: {folder}", file=sys.stderr, flush=True)
    return folder


def print_stage(stage: str) -> None:
    """Print to standard error what an export does next; that it checks on a terminal only, so a refusal is one line."""
    if stage != "checking" or sys.stderr.isatty():
        print(f"export: {stage}", file=sys.stderr, flush=True)
