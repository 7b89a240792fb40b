"""The contract of caches: what a row holds, and how it gets there other than by steps.

The positions of one row, of which a step writes S from `write_at` on:

    0 ... committed - 1      committed ... capacity - 1
    tokens of the text       the draft's nodes, until one path of them is kept; then free
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engines.cache.prefix import PrefixCache


class KvCache(ABC):
    """Keys and values of an engine's rows.

    Released or cleared, a row holds nothing from the given column on: no number left there counts later, masked or not.

    Attributes:
        rows, capacity: of the cache; columns per row.
        kv: what steps write, laid out as each kind says; OpenVINO's lies in arrays of its own.
        page_columns, page_bytes: columns and bytes of a page, where rows share a pool of pages; else 0.
        pages: of the pool, those for kept prefixes not counted; 0 where rows have memory of their own.
        user: the runtime's: which of a pair's `LLM`s has requests in its rows.
    """

    page_columns: int = 0
    page_bytes: int = 0
    pages: int = 0
    user: object = None
    rows: int
    capacity: int
    kv: Tensor

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it lies."""

    def allocate_pages(self, num_pages: int) -> None:
        """Have a pool of so many pages, before anything is stored; for caches whose rows share one."""
        raise NotImplementedError

    def beam_pages(self, draft_len: int) -> int:
        """Pages that each beam of a draft of so many tokens has of its own, besides those of its row."""
        return 0

    def fits(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether the first rows can be written at columns start .. end - 1 all together, (start, end) of each.

        Rows that have memory of their own always can; rows that share a pool of pages can while pages last.
        """
        return True

    def reserve(self, spans: Sequence[tuple[int, int]], first_row: int = 0) -> None:  # noqa: B027 - the step itself may
        """Make sure that consecutive rows can be written at columns start .. end - 1, (start, end) of each.

        Where rows share a pool of pages, `fits` must say so. Where steps take what they write, there is nothing to do.
        """

    @abstractmethod
    def release(self, row: int) -> None:
        """Release the memory of what a row holds."""

    @abstractmethod
    def clear(self, row: int, start: int = 0) -> None:
        """Zero the columns of a row from `start` on: after a failure they may hold what is not a number."""

    @abstractmethod
    def copy(self, source: int, to: int, columns: int) -> None:
        """Let a row begin with the first columns of another, whose pages it may share."""

    @abstractmethod
    def keep(self, source: Tensor, to: Tensor) -> None:
        """Commit the accepted nodes of rows 0 .. R - 1: move their columns to the text's end.

        Args:
            source, to: int64 [R, D] on the cache's device, ascending in each row, to <= source, equal where one stays.
        """

    @abstractmethod
    def prefix_cache(self, tokens: int) -> PrefixCache:
        """Memory for the keys and values of `tokens` tokens of earlier prompts at most."""

    def discard_writes(self) -> None:  # noqa: B027 - rows of their own are zeroed by `reset`
        """Until `reset`, what steps write is nobody's, and no row holds anything."""

    def reset(self) -> None:
        """Zero all rows."""
        for row in range(self.rows):
            self.clear(row)
