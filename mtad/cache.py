"""Where this package keeps, for one user and machine, what it would otherwise measure again. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder of this package: `$MTAD_CACHE`, else `$XDG_CACHE_HOME/mtad`, else `~/.cache/mtad`."""
    own = os.environ.get("MTAD_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mtad"
