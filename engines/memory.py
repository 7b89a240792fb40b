"""How much memory a pair takes, and how many rows fit a given amount. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mtad.errors import InvalidInput

if TYPE_CHECKING:
    from engines.base import EngineSpec


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """What two engines and their caches take, in bytes.

    The activations inside a step, and what captured blocks keep on a GPU, are not counted; they are small beside
    weights and caches unless `max_prefill_tokens` is large.

    Attributes:
        rows, capacity: requests at once, KV columns per row.
        row: keys and values of a row, of caches whose rows have memory of their own; and those of beams that have some.
        logits: logits of one row at the largest draft, the target's and one working copy.
        prefixes: cached keys and values of earlier prompts, both engines.
        page_columns, page: columns and bytes of a page, of all caches whose rows share a pool of pages.
        pages: pages that rows share.
    """

    rows: int
    capacity: int
    weights: int
    row: int
    logits: int
    prefixes: int
    page_columns: int = 0
    page: int = 0
    pages: int = 0

    @classmethod
    def of(
        cls,
        target: EngineSpec,
        auxiliary: EngineSpec,
        weights: int,
        nodes: int,
        prefix_tokens: int,
        page_columns: int = 0,
        page_bytes: tuple[int, int] = (0, 0),
    ) -> Memory:
        """The memory of a pair.

        Args:
            nodes: positions the target scores in a step at most.
            prefix_tokens: prompt tokens whose keys and values are kept, in either cache.
            page_columns, page_bytes: columns of a page, and bytes of one in either engine; 0 where rows share none.
        """
        rows, capacity, page = target.rows, target.capacity, sum(page_bytes)
        row = sum(one.kv_bytes for one, paged in zip((target, auxiliary), page_bytes, strict=True) if not paged) // rows
        logits = 2 * nodes * target.vocab_size * 4
        kept, pool = row * prefix_tokens // capacity, 0
        if page:
            kept += prefix_tokens // page_columns * page
            pool = rows * capacity // page_columns
        return cls(rows, capacity, weights, row, logits, kept, page_columns, page, pool)

    @property
    def total(self) -> int:
        return self.weights + self.prefixes + self.cache + self.rows * self.logits

    @property
    def cache(self) -> int:
        return self.rows * self.row + self.pages * self.page

    def within(self, size: int | str) -> Memory:
        """The same with as many rows as fit `size` bytes (or `"4GiB"`); or with as many pages, at most all rows'.

        Raises:
            InvalidInput: not even one row fits, or the pages that one row can fill.
        """
        if self.page:
            least = replace(self, pages=self.capacity // self.page_columns)
            pages = least.pages + (parse_bytes(size) - least.total) // self.page
            if pages < least.pages:
                problem = f"weights, logits and the pages of one row take {format_bytes(least.total)}"
                raise InvalidInput("memory", size, problem)
            return replace(self, pages=min(pages, self.pages))
        rows = (parse_bytes(size) - self.weights - self.prefixes) // (self.row + self.logits)
        if rows < 1:
            raise InvalidInput("memory", size, f"weights and one row take {format_bytes(replace(self, rows=1).total)}")
        return replace(self, rows=rows)

    def __str__(self) -> str:
        pages = f" in {self.pages} pages" if self.page else ""
        return (
            f"memory: weights {format_bytes(self.weights)} + {self.rows} rows x {self.capacity} columns{pages} "
            f"{format_bytes(self.cache)} + logits {format_bytes(self.rows * self.logits)} + kept prefixes "
            f"{format_bytes(self.prefixes)} = {format_bytes(self.total)}"
        )


def parse_bytes(size: int | str, field: str = "memory") -> int:
    """Bytes from a number or from text such as `512MiB`, `4GB`, `4G` (all powers of 1024)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(size).strip(), re.IGNORECASE)
    if isinstance(size, bool) or found is None:
        raise InvalidInput(field, size, "give bytes, or text such as 4GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def format_bytes(size: int) -> str:
    """A size as people read it, such as `1.5 GiB`."""
    from pydantic import ByteSize  # which a GPU's machine may lack

    return ByteSize(size).human_readable(separator=" ")
