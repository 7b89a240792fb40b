"""Runs of paged attention and the sequences they consist of.

A run is filled up with blanks so that there are few sizes: OpenVINO keeps kernels for every shape it has met.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


def blanks(tokens: int, page: int) -> list[Sequences]:
    """What fills a run of `tokens` up to `size`: a sequence of fewer tokens than a page has, or nothing.

    Its tokens may be any; here all are that of the first row's first column.

    Args:
        page: where their keys and values go; no row has it.
    """
    count = size(tokens) - tokens
    zeros, one = np.zeros(count, np.int64), np.ones(1, np.int64)
    return [Sequences(0 * one, count * one, zeros, zeros, np.array([page], np.int32), one, [])] if count else []


def size(tokens: int) -> int:
    """The number of tokens that a run of `tokens` is filled up to: up to 16 its own, then eight per doubling."""
    step = min(PAGE, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step


class Run(NamedTuple):
    """A step as paged attention takes it: T tokens of N sequences, one behind the other; the last may be blanks.

    Attributes:
        rows: int64 [R], those of the step, and behind them those whose prompts are run beside it.
        own: int64 [R], where each row's columns of the step itself begin, behind those that are run again or beside it.
        stored: int64 [R], columns that each row still has stored if the run fails.
        copies: pages to copy before the step, (from, to); all are read before any is written.
        feeds: the graph's inputs by name. tokens, positions: int64 [1, T]. keep: int64 [K], places of the step's kept
            logits among the T. past_lens: int32 [N], columns before each sequence's first token, all of which its
            tokens see. subsequence_begins: int32 [N + 1], each sequence's first token among the T, and T.
            block_indices, block_indices_begins: int32, the pages of each sequence's columns, and where each one's
            begin. qq_bias: uint8, of each sequence its tokens' mask among themselves, flattened, one after the other;
            empty where all are causal. qq_bias_begins: int32 [N + 1], where each mask begins; empty where all are
            causal. max_context_len: int32, columns of the longest sequence.
    """

    rows: Ints
    own: Ints
    stored: Ints
    copies: list[tuple[int, int]]
    feeds: dict[str, Any]
