"""How the rules are compiled: plain functions of one row's NumPy arrays, by numba.

Uncompiled, with `NUMBA_DISABLE_JIT=1`, they are the same functions. What was compiled is kept in a folder that is named
after a hash of Python's and numba's versions and of all sources here: numba sees no change in another function's file.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from numba import __version__ as numba_version
from numba import config, njit, typeof
from numba.core.caching import UserProvidedCacheLocator

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


@lru_cache(maxsize=1)
def cache_folder() -> Path:
    """Where compiled functions are kept: `$NUMBA_CACHE_DIR`, else the user's cache folder, else a temporary one."""
    digest, package = hashlib.sha256(f"{sys.version} {numba_version}".encode()), Path(__file__).parent
    for source in sorted([*package.glob("*.py"), *package.glob("rules/*.py")]):
        digest.update(source.read_bytes())
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mtad", "compiled")
    folder = Path(config.CACHE_DIR or user, digest.hexdigest()[:16])
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        temporary = tempfile.mkdtemp(prefix="mtad-compiled-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        log.warning("compiled functions are not kept: %s cannot be written (%s)", folder, error.strerror)
        return Path(temporary)


class Locator(UserProvidedCacheLocator):  # type: ignore[misc] # numba comes without types
    """Where numba keeps a function: below `cache_folder`, wherever the sources lie, since all environments share it."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return Path(py_file).parent.name


def compiled(function: F, nogil: bool = False) -> F:
    """Compile a function when it is first called with arguments of some types.

    `parallel` is not used, because its threads disturb the engines', nor `fastmath=True`, which is wrong for -inf.

    Args:
        nogil: Python calls it without the GIL. That pays where it runs for milliseconds, or in several threads: beside
            a busy thread, a GIL that was released comes back after the 5 ms of `sys.getswitchinterval`.
    """
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = str(cache_folder()), f"{__name__}.{Locator.__name__}"
    try:
        made: F = njit(nogil=nogil, cache=True, error_model="numpy")(function)
        return made
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


def entry_of(function: F, *arguments: object) -> F:
    """Call a function, and return its machine code for arguments of these types, which takes a third of the time.

    Nothing looks at types there: dimensions and contiguity of arrays must be the same ever after.
    """
    function(*arguments)
    find = getattr(function, "get_overload", None)  # which uncompiled functions lack
    return find(tuple(map(typeof, arguments))) if find else function
