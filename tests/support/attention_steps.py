"""Random steps of trees over ragged caches of pages, and their attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.base import KV_PAGE
from engines.cache.paged import gathered
from engines.pytorch.attention import attend_cached
from export.verification.verify import ancestors_of, random_tree

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of an output's difference, in units of 1 plus its size: some of what a weight and the output are rounded by."""
SCALE = 0.3
"""Of scores."""


@dataclass(frozen=True)
class Case:
    """Sizes of a step. `starts` are its rows' committed columns, up to the root of each row's tree.

    Attributes:
        starts: `write_at`, by row.
        kv_heads, group, head_dim: KV, query heads a KV head, size of a head.
        steps: S, the root and the nodes of its tree.
        length: L.
        dtype: of queries, keys and values.
        softcap, window: of scores.
        seed: of the values.
    """

    starts: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    steps: int = 5
    length: int = 64
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    window: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Arguments of `engines.pytorch.attention.attend_cached`; `pool` is [2, KV, pages x 64, D], keys and values."""

    case: Case
    query: Tensor
    pool: Tensor
    page_table: Tensor
    mask: Tensor
    write_at: Tensor
    positions: Tensor

    @property
    def cache(self) -> Tensor:
        """A view of the pool by rows, whose pages follow each other: [2, R, KV, C, D]."""
        pair, heads, _, dim = self.pool.shape
        return self.pool.view(pair, heads, len(self.page_table), -1, dim).transpose(1, 2)

    def attend(self) -> Tensor:
        """What the kernels give."""
        keys, values = self.pool
        more = (SCALE, self.case.softcap, self.case.window, self.positions)
        return attend_cached(self.query, keys, values, self.page_table, self.mask, self.write_at, *more)

    def reference(self) -> Tensor:
        """The same in float64, [R, S, H, D]; a query that sees nothing gets zeros."""
        seen, columns = self.mask, torch.arange(self.case.length, device=self.mask.device)
        if self.case.window is not None:
            seen = seen & (self.positions[:, None, :, None] - columns < self.case.window)
        held = gathered(self.pool, self.page_table)[..., : self.case.length, :]
        keys, values = held.double().repeat_interleave(self.case.group, 2)
        scores = SCALE * (self.query.double() @ keys.transpose(2, 3))
        if self.case.softcap is not None:
            scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        out: Tensor = weights @ values
        return out.transpose(1, 2)

    def difference(self) -> float:
        """Largest difference of the two, see `TOLERANCE`."""
        reference = self.reference()
        return float(((self.attend() - reference).abs() / (1 + reference.abs())).max())


def make(case: Case, spare: int = 64) -> Inputs:
    """A random step; each row has `spare` columns more than the mask, in pages.

    Positions are those of tokens in a tree: a token's is its parent's and 1.
    """
    generator, random = torch.Generator().manual_seed(case.seed), torch.Generator().manual_seed(case.seed)
    rows, steps = len(case.starts), case.steps
    heads = case.kv_heads * case.group

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(case.dtype)

    # as a model gives them: heads of one token lie together
    query = values(rows, steps, heads, case.head_dim).transpose(1, 2)
    pages = (case.length + spare) // KV_PAGE
    pool = values(2, case.kv_heads, rows * pages * KV_PAGE, case.head_dim)
    page_table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
    write_at = torch.tensor(case.starts)
    tree = ancestors_of(random_tree(rows, steps - 1, generator))
    shown = torch.zeros(rows, steps, case.length + steps, dtype=torch.bool)
    for row, start in enumerate(case.starts):
        shown[row, :, : start + 1] = True
        shown[row, 1:, start + 1 : start + steps] = tree[row]
    positions = write_at[:, None] + torch.nn.functional.pad(tree.sum(2), (1, 0))
    mask = shown[:, None, :, : case.length].contiguous()
    write_at = torch.stack([write_at, write_at - 1], 1)[:, 0]  # as a draft's first step has it: a column of a table
    return Inputs(case, query, pool, page_table, mask, write_at, positions)
