"""Engines in other processes, held up from a test's process by a file: what they run ends no earlier than a test wants.

Those processes call `install` at their start, before they import anything of this package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.paths import ROOT

FILE = "MTAD_TEST_HOLD"
"""The environment variable with the file's path."""


class Hold:
    """A test's side.

    Attributes:
        environment: variables with which a Python process calls `install`, and finds the file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text("import tests.support.held\n\ntests.support.held.install()\n")
        self._file = folder / "seconds"
        path = os.pathsep.join([str(folder), str(ROOT)])
        self.environment = {"PYTHONPATH": path, FILE: str(self._file)}

    @contextlib.contextmanager
    def __call__(self, seconds: float) -> Iterator[None]:
        """Each block lasts so long at least; one that is under way ends with this context."""
        whole = self._file.with_name("written")
        whole.write_text(str(seconds))
        whole.rename(self._file)
        try:
            yield
        finally:
            self._file.unlink()


def install() -> None:
    """Hold up the blocks of this process. Costs nothing until it imports what runs them."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "runtime.decoder.host_runner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_hold(module: Any) -> None:
            execute(module)
            _hold(module.HostRunner)

        loader.exec_module = execute_and_hold
        return spec


def _hold(runner: Any) -> None:
    run, file = runner.run, Path(os.environ[FILE])

    def held(self: Any, *args: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            end = time.monotonic() + float(file.read_text())
            while file.exists() and time.monotonic() < end:
                time.sleep(0.005)
        return run(self, *args)

    runner.run = held
