"""Runs of paged attention and the sequences they consist of.

A run is padded so that there are few sizes: OpenVINO keeps kernels for every shape it has met.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engines.cache.page_table import Ints, PageTable
from engines.openvino.graph import PAGE


class Sequences(NamedTuple):
    """Sequences of a run, one behind the other.

    Attributes:
        past: int64 [N], columns that are there before each one's new tokens.
        sizes: int64 [N], new tokens of each.
        rows, columns: int64 [T], whose token each of the new tokens is.
        pages: int32, the pages of each sequence's columns.
        used: int64 [N], how many of these each one has.
        copies: pages to copy before the run, (from, to); all are read before any is written.
    """

    past: Ints
    sizes: Ints
    rows: Ints
    columns: Ints
    pages: NDArray[np.int32]
    used: Ints
    copies: list[tuple[int, int]]


def texts_of(table: PageTable, rows: Ints, past: Ints, ends: Ints) -> Sequences:
    """A sequence per row, of its columns past .. ends - 1, int64 [R]; the row is given pages of its own for them."""
    sizes = ends - past
    lacking = np.flatnonzero(table.missing(rows, past, ends)).tolist()
    copies = [pair for n in lacking for pair in table.make_writable(rows[n], past[n], ends[n])]
    used, pages = -(-ends // table.size), table.table[rows]
    first = np.repeat(past - sizes.cumsum() + sizes, sizes)
    return Sequences(
        past=past,
        sizes=sizes,
        rows=np.repeat(rows, sizes),
        columns=np.arange(len(first)) + first,
        pages=pages[np.arange(pages.shape[1]) < used[:, None]],
        used=used,
        copies=copies,
    )


class Run(NamedTuple):
    """A step as paged attention takes it: T tokens of N sequences, one sequence after the other, without padding.

    Attributes:
        rows: int64 [R], those of the step, and behind them those whose prompts are run beside it.
        own: int64 [R], where each row's columns of the step itself begin, behind those that are run again or beside it.
        stored: int64 [R], columns that each row still has stored if the run fails.
        tokens, positions: int64 [1, T].
        past: int32 [N], columns before each sequence's first token, all of which its tokens see.
        begins: int32 [N + 1], each sequence's first token among the T, and T.
        pages, page_begins: int32, the pages of each sequence's columns, and where each one's begin.
        masks: uint8, of each sequence its tokens' mask among themselves, flattened, one after the other; empty where
            all are causal.
        mask_begins: int32 [N + 1], where each mask begins; empty where all are causal.
        keep: int64 [K], places of the step's kept logits among the T.
        copies: pages to copy before the step, (from, to); all are read before any is written.
    """

    rows: Ints
    own: Ints
    stored: Ints
    tokens: Ints
    positions: Ints
    past: NDArray[np.int32]
    begins: NDArray[np.int32]
    pages: NDArray[np.int32]
    page_begins: NDArray[np.int32]
    masks: NDArray[np.uint8]
    mask_begins: NDArray[np.int32]
    keep: Ints
    copies: list[tuple[int, int]]


def size(tokens: int) -> int:
    """The number of tokens that a run of `tokens` is padded to: up to 16 its own, then eight per doubling."""
    step = min(PAGE, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


def padded(run: Run, page: int) -> Run:
    """The same run with blank tokens up to `size`, fewer than a page, as a sequence of their own behind the others.

    Args:
        page: where the blanks' keys and values go; no row has it.
    """
    count = run.tokens.shape[1]
    blanks = size(count) - count
    if not blanks:
        return run
    tokens, positions = (np.pad(values, ((0, 0), (0, blanks))) for values in (run.tokens, run.positions))
    masks, mask_begins = run.masks, run.mask_begins
    if len(masks):
        masks = np.concatenate([masks, np.tri(blanks, dtype=np.uint8).ravel()])
        mask_begins = _with(mask_begins, len(masks))
    return run._replace(
        tokens=tokens,
        positions=positions,
        past=_with(run.past, 0),
        begins=_with(run.begins, count + blanks),
        pages=_with(run.pages, page),
        page_begins=_with(run.page_begins, len(run.pages) + 1),
        masks=masks,
        mask_begins=mask_begins,
    )


def _with(values: NDArray[np.int32], last: int) -> NDArray[np.int32]:
    return np.append(values, values.dtype.type(last))
