"""Libraries that talk about their own internals."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what they print, warn and log while an export uses them from our users; errors are raised all the same.

    ONNX Runtime's quantisers even give the root logger a handler when they are imported.
    """
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(disabled)
            root.handlers[:] = handlers
            root.setLevel(level)


def quiet_transformers() -> None:
    """Keep transformers' progress bars and warnings off stderr, where commands report; errors are still raised."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
