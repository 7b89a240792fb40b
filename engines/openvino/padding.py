"""Few numbers of tokens per run: OpenVINO keeps kernels for every shape that it has met, and steps have any number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engines.openvino.columns import Run
from engines.openvino.graph import PAGE


def size(tokens: int) -> int:
    """The number of tokens that a run of `tokens` is padded to: up to 16 its own, then eight per doubling."""
    step = min(PAGE, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def padded(run: Run, page: int) -> Run:
    """The same run with blank tokens up to `size`, fewer than a page, as a row of their own behind the others.

    Args:
        page: where the blanks' keys and values go; nobody else has it.
    """
    count = run.tokens.shape[1]
    blanks = size(count) - count
    if not blanks:
        return run
    tokens, positions = (np.pad(values, ((0, 0), (0, blanks))) for values in (run.tokens, run.positions))
    sees, sees_begins = run.sees, run.sees_begins
    if len(sees):
        sees = np.concatenate([sees, np.tri(blanks, dtype=np.uint8).ravel()])
        sees_begins = _with(sees_begins, len(sees))
    return run._replace(
        tokens=tokens,
        positions=positions,
        past=_with(run.past, 0),
        begins=_with(run.begins, count + blanks),
        pages=_with(run.pages, page),
        page_begins=_with(run.page_begins, len(run.pages) + 1),
        sees=sees,
        sees_begins=sees_begins,
    )


def _with(values: NDArray[np.int32], last: int) -> NDArray[np.int32]:
    return np.append(values, values.dtype.type(last))
