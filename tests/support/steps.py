"""Steps of an engine, and the tokens that tests give it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import pad

from engines.base import KV_PAGE, Engine, Step, mask_length
from engines.cache.columns import ColumnCache
from engines.cache.paged import PageCache, gathered, slots

LENGTHS = [70, 5, 33, 1]
"""Tokens in the cache rows that the tests start from."""


def some_tokens(row: int, count: int) -> torch.Tensor:
    return torch.randint(300, (count,), generator=torch.Generator().manual_seed(row))


def make_step(
    tokens: torch.Tensor,
    write_at: list[int],
    first_row: int = 0,
    keep: list[int] | None = None,
    length: int | None = None,
) -> Step:
    """A causal step: each row's tokens continue what is in its columns 0 .. write_at - 1."""
    steps = tokens.shape[1]
    start = torch.tensor(write_at)
    positions = start[:, None] + torch.arange(steps)
    length = length or mask_length(max(write_at) + steps, 256)
    mask = (torch.arange(length) <= positions[:, :, None])[:, None]
    kept = list(range(steps)) if keep is None else keep
    return Step(tokens, positions, start, mask, torch.tensor(kept, dtype=torch.int64), first_row)


def more_tokens(rows: int, steps: int) -> torch.Tensor:
    return torch.stack([some_tokens(100 + row, 8)[:steps] for row in range(rows)])


def alone_and_together(engine: Engine) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of a row that steps alone, and of the same row and steps among all of `LENGTHS`."""
    for row, length in enumerate(LENGTHS):
        engine.step(make_step(some_tokens(row, length)[None], [0], first_row=row, keep=[]))
    tokens = more_tokens(4, 5)
    whole = engine.step(make_step(tokens, LENGTHS))
    for steps, row in itertools.product((1, 2), range(4)):
        alone = engine.step(make_step(tokens[row : row + 1, :steps], LENGTHS[row : row + 1], first_row=row))
        yield alone[0], whole[row, :steps]


def columns_of(engine: Engine) -> torch.Tensor:
    """What the columns of all rows hold, [layers, 2, rows, kv_heads, capacity, head_dim]; it may be a copy."""
    cache = engine.cache
    if isinstance(cache, PageCache):
        return gathered(cache.kv, cache.page_table[:, :-1])
    assert isinstance(cache, ColumnCache)
    return pad(cache.kv, (0, 0, 0, engine.spec.capacity - cache.kv.shape[4]))


def change(engine: Engine, row: int, columns: slice, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change what some columns of a row hold, as far as it has them."""
    cache = engine.cache
    if isinstance(cache, ColumnCache):
        cache.kv[:, :, row, :, columns] = by(cache.kv[:, :, row, :, columns])
        return
    assert isinstance(cache, PageCache)
    start, end, _ = columns.indices(int(cache.table.owned[row]) * KV_PAGE)
    at = slots(cache.page_table[row : row + 1], torch.arange(start, end)[None])[0]
    cache.kv[:, :, :, at] = by(cache.kv[:, :, :, at])
