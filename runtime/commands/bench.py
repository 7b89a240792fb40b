"""`mtad bench`: the benchmarks of a checkout."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from mtad.errors import InvalidInput
from runtime.commands.entry import command


@command
def main() -> None:
    """Run `scripts.bench`, which is part of a checkout and not of the installed package."""
    sys.path.insert(0, str(Path.cwd()))
    if find_spec("scripts") is None or find_spec("scripts.bench") is None:
        raise InvalidInput("folder", str(Path.cwd()), "the benchmarks are not installed; run this in a checkout")
    runpy.run_module("scripts.bench", run_name="__main__")
