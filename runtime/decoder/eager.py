"""What runs between the steps of the two models: the functions of `mtad.block`, eager or compiled for ONNX Runtime.

Both have the same signatures. The compiled ones write to memory of their own, the same for every block: what they
return is valid until the next block begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtad import block
from mtad.accept import Accepted
from mtad.block import Begun, Context, Draft, Grown, Inputs
from mtad.distribution import Candidates
from mtad.draft import Level, stack
from mtad.live import Live
from mtad.noise import LevelNoise, Noise
from mtad.rows import Place, Rows, Shape
from mtad.tree import TokenTree


class BlockFunctions:
    """The functions of `mtad.block` for blocks of one shape, run by torch as they are."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def begin(self, context: Context, rows: Rows) -> Begun:
        return block.begin(context, rows)

    def grow(
        self,
        depth: int,
        above: Level,
        sees: Tensor,
        logits: Tensor,
        noise: LevelNoise,
        place: Place,
        begun: Begun,
        context: Context,
        rows: Rows,
        live: Live | None = None,
    ) -> Grown:
        forms = self._shape.forms
        return block.grow(above, sees, logits, noise, place, begun.holds, context, rows, forms, live, depth)

    def finish(self, levels: Sequence[Grown], rows: Rows) -> Draft:
        tree, origin = block.finish(stack([grown.level for grown in levels]), rows, self._shape.selects)
        first = zip(*(grown.first for grown in levels), strict=True)
        return Draft(tree, origin, Candidates(*(torch.stack(column) for column in first)), filtered_levels(levels))

    def arrange(self, tree: TokenTree | None, context: Context, rows: Rows) -> Inputs:
        return block.arrange(tree, context, rows)

    def decide(
        self, draft: Draft | None, adjusted: Tensor, logits: Tensor, noise: Noise, committed: Tensor, rows: Rows
    ) -> Accepted:
        return block.decide(draft, adjusted, logits, noise, committed, rows, self._shape.rules)


class TorchFunctions:
    """Where the functions come from."""

    def of(self, rows: int, shape: Shape, length: int) -> BlockFunctions:
        """The functions for blocks of `rows` rows, whose masks have `length` columns."""
        return BlockFunctions(shape)


def filtered_levels(levels: Sequence[Grown]) -> tuple[Candidates, ...]:
    """The filtered distributions that each level was drawn from, where the levels keep them."""
    return tuple(grown.above for grown in levels if grown.above is not None)
