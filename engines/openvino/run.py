"""A run of paged attention, padded so that there are few sizes: OpenVINO keeps kernels for every shape it has met."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.cache.page_table import Ints
from engines.openvino.graph import PAGE


class Run(NamedTuple):
    """A step as paged attention takes it: T tokens of N sequences, one sequence after the other, without padding.

    Attributes:
        rows: int64 [R], those of the step, and behind them those whose prompts are run beside it.
        own: int64 [R], where each row's columns of the step itself begin, behind those that are run again or beside it.
        held: int64 [R], columns that each row holds if the run fails.
        tokens, positions: int64 [1, T].
        past: int32 [N], columns before each sequence's first token, all of which its tokens see.
        begins: int32 [N + 1], each sequence's first token among the T, and T.
        pages, page_begins: int32, the pages of each sequence's columns, and where each one's begin.
        sees: uint8, of each sequence its tokens' mask among themselves, flattened, one after the other; empty where
            all are causal.
        sees_begins: int32 [N + 1], where each mask begins; empty where all are causal.
        keep: int64 [K], places of the step's kept logits among the T.
        copies: pages to copy before the step, (from, to); all are read before any is written.
    """

    rows: Ints
    own: Ints
    held: Ints
    tokens: Ints
    positions: Ints
    past: NDArray[np.int32]
    begins: NDArray[np.int32]
    pages: NDArray[np.int32]
    page_begins: NDArray[np.int32]
    sees: NDArray[np.uint8]
    sees_begins: NDArray[np.int32]
    keep: Ints
    copies: list[tuple[int, int]]


def size(tokens: int) -> int:
    """The number of tokens that a run of `tokens` is padded to: up to 16 its own, then eight per doubling."""
    step = min(PAGE, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def padded(run: Run, page: int) -> Run:
    """The same run with blank tokens up to `size`, fewer than a page, as a sequence of their own behind the others.

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
