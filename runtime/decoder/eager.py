"""What runs between the steps of the two models: the functions of `mtad.block`, eager or compiled for ONNX Runtime.

Both have the same signatures. The compiled ones write to memory of their own, the same for every block: what they
return is valid until the next block begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mtad import block
from mtad.block import Begun, Context, Draft, Grown, Inputs
from mtad.distributions.filters import FILTERS, Filters
from mtad.distributions.table import Distributions, Table
from mtad.draft.levels import Level, stack
from mtad.draft.live import Live
from mtad.draft.tree import TokenTree
from mtad.noise import device as device_noise
from mtad.noise.host import LevelNoise, Noise
from mtad.rows import Place, Rows, Shape
from mtad.rules.accept import Accepted

Given = tuple[Level, Tensor, Tensor, LevelNoise, Place, Tensor, Context, Rows]
"""Arguments of `mtad.block.grow` up to the rows."""


class BlockFunctions:
    """The functions of `mtad.block` for blocks of one shape, run by torch as they are.

    Attributes:
        filters: give the distributions that levels are drawn from and drafts are judged by.
    """

    filters: ClassVar[Filters] = FILTERS

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def begin(self, context: Context, rows: Rows) -> Begun:
        return block.begin(context, rows)

    def grow(self, depth: int, given: Given, live: Live | None = None) -> Grown:
        return block.grow(*given, self._shape.forms, live, depth, self._shape.tables, self.filters)

    def hold_back(self, grown: Grown, rows: Rows) -> None:
        """Let no path of `bild` grow behind a token that the target is going to choose: nobody looks at what follows.

        Where the auxiliary is less sure of its most likely token than the row asks.
        """
        most = grown.first[0].most
        if len(grown.first) > 1:
            most = torch.where(rows.tabulated, grown.first[1].most, most)
        grown.level.growing.logical_and_(most[:, None] >= rows.log_fallback)

    def finish(self, levels: Sequence[Grown], rows: Rows) -> Draft:
        tree, origin = block.finish(stack([grown.level for grown in levels]), rows, self._shape.selects)
        return Draft(
            tree,
            origin,
            stacked([grown.first for grown in levels], "chain" in self._shape.forms),
            filtered_levels(levels),
        )

    def arrange(self, tree: TokenTree | None, context: Context, rows: Rows) -> Inputs:
        return block.arrange(tree, context, rows)

    def decide(
        self, draft: Draft | None, adjusted: Tensor, logits: Tensor, noise: Noise, committed: Tensor, rows: Rows
    ) -> Accepted:
        rules, tables = self._shape.rules, self._shape.tables
        return block.decide(draft, adjusted, logits, noise, committed, rows, rules, tables, self.filters)


class TorchFunctions:
    """Where the functions come from."""

    def of(self, rows: int, shape: Shape, length: int) -> BlockFunctions:
        """The functions for blocks of `rows` rows, whose masks have `length` columns."""
        return BlockFunctions(shape)

    def draw_noise(self, states: Tensor, scales: Tensor, shape: Shape) -> Noise:
        """The noise of a block on a device, `mtad.noise.device.draw`."""
        return device_noise.draw(states, scales, shape)


def stacked(levels: Sequence[tuple[Distributions, ...]], logits: bool = True) -> tuple[Distributions, ...]:
    """Distributions of each level, [R, K], as those of all: [draft_len, R, K].

    Args:
        logits: whether a rule looks at more than the numbers of a table; else all levels are given the first one's.
    """
    found: list[Distributions] = []
    for own in zip(*levels, strict=True):
        first, *others = zip(*own, strict=True)
        same = isinstance(own[0], Table) and not logits
        whole = first[0].expand(len(own), *first[0].shape) if same else joined(first)
        found.append(type(own[0])(whole, *map(torch.stack, others)))
    return tuple(found)


def joined(levels: tuple[Tensor, ...]) -> Tensor:
    """`torch.stack`; on the host, of levels that lie one behind the other in memory, without a copy."""
    first, *others = levels
    if not others or first.device.type != "cpu":
        return torch.stack(levels)
    step = others[0].storage_offset() - first.storage_offset()
    spaced = all(x.storage_offset() == first.storage_offset() + n * step for n, x in enumerate(levels))
    if step <= 0 or not spaced or len({(x.untyped_storage().data_ptr(), x.shape, x.stride()) for x in levels}) > 1:
        return torch.stack(levels)
    return first.as_strided((len(levels), *first.shape), (step, *first.stride()))


def filtered_levels(levels: Sequence[Grown]) -> tuple[tuple[Distributions, ...], ...]:
    """The filtered distributions that each level was drawn from, where the levels keep them."""
    return tuple(grown.above for grown in levels if grown.above)
