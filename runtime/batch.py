"""The input of a block, laid out in memory that stays the same from block to block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtad.draft import Level, root
from mtad.noise import Draws, Noise
from mtad.params import DecodingParams
from mtad.rows import Place, Rows, Shape, block_shape, places, stack_rows
from runtime.constraints import Constraint, Constraints
from runtime.slab import Slab, packed, size_of, views

KEPT, KEPT_BYTES = 64, 2**22
"""Batches of parameters whose tensors are kept, and the memory they may take together; the latest is always kept."""


@dataclass(frozen=True)
class Batch:
    """One block's input, rows 0 .. R-1 of the caches.

    Attributes:
        last_two: int64 [R, 2], the last two committed tokens; the last is the root of the tree.
        committed: int64 [R], committed tokens.
        longest: largest of `committed`, known to the host.
        rows: parameters.
        root: the level above the draft's first.
        places: the draft's levels.
        shape: of the draft.
        noise: of this block.
        constraints: what rows ask of both models' logits; None where none asks for anything.
    """

    last_two: Tensor
    committed: Tensor
    longest: int
    rows: Rows
    root: Level
    places: tuple[Place, ...]
    shape: Shape
    noise: Noise
    constraints: Constraints | None = None


class Batches:
    """Makes batches, all in the same memory. Owns it: what others keep of a batch keeps nothing else alive.

    Parameters are made tensors once for as long as rows ask for the same, whichever requests they are.

    Args:
        vocab_size: V.
        eos: tokens that end a text.
    """

    def __init__(self, vocab_size: int, eos: Sequence[int]) -> None:
        self._vocab_size, self._eos = vocab_size, eos
        self._layouts: OrderedDict[tuple[object, ...], _Layout] = OrderedDict()
        self._slab = Slab()
        self._places: OrderedDict[tuple[int, Shape], _Place] = OrderedDict()
        self._placed: tuple[_Layout, _Place] | None = None

    def batch(
        self,
        params: Sequence[DecodingParams],
        last_two: Sequence[tuple[int, int]],
        committed: Sequence[int],
        keys: Sequence[tuple[int, int]],
        constraints: Sequence[Constraint | None] = (),
    ) -> Batch:
        """The input of a block; its tensors are valid until the next call.

        Args:
            params: of each row, as far as this block goes: a draft may be shorter or narrower than the request's.
            last_two: the last two committed tokens of each row.
            committed: committed tokens of each row.
            keys: (seed, block index) of each row.
            constraints: of each row; () where none asks for anything.
        """
        content = tuple(map(_content, params))
        layout = self._layouts.get(content)
        if layout is None:
            while len(self._layouts) >= KEPT or sum(len(kept.packed) for kept in self._layouts.values()) > KEPT_BYTES:
                self._layouts.popitem(last=False)
            layout = self._layouts[content] = _Layout(params, self._vocab_size, self._eos)
        else:
            self._layouts.move_to_end(content)
        if self._placed is None or self._placed[0] is not layout:
            self._placed = layout, self._place(layout, len(params))
        batch = self._placed[1].batch(layout.draws, last_two, committed, keys)
        if any(constraint is not None for constraint in constraints):
            return replace(batch, constraints=Constraints.of(constraints))
        return batch

    def _place(self, layout: _Layout, count: int) -> _Place:
        """Lay out the memory for a batch of `count` rows."""
        place = self._places.get((count, layout.shape))
        if place is None:
            if len(self._places) >= KEPT:
                self._places.popitem(last=False)
            place = self._places[count, layout.shape] = _Place(layout, count, self._slab)
        else:
            self._places.move_to_end((count, layout.shape))
        place.hold(layout)
        return place


def _content(p: DecodingParams) -> tuple[object, ...]:
    """What of a row's parameters the tensors of a batch depend on."""
    return (
        p.method,
        p.draft_len,
        p.beam_width,
        p.accept_threshold,
        p.temperature,
        p.top_k,
        p.top_p,
        p.ignore_eos,
    )


class _Layout:
    """Parameters of a batch as tensors.

    Attributes:
        shape: of the batch's blocks.
        packed: `Rows`, the root's `Level` and the places, see `runtime.slab.packed`; `tensors` are views of it.
        draws: what the rows draw.
    """

    def __init__(self, params: Sequence[DecodingParams], vocab_size: int, eos: Sequence[int]) -> None:
        self.shape = block_shape(params, vocab_size)
        rows = stack_rows(params, self.shape, vocab_size, eos)
        tensors = rows, root(rows, self.shape), places(rows, self.shape)
        self.packed = packed(tensors)
        self.tensors = views(tensors, self.packed)
        self.draws = Draws(params, vocab_size)


class _Place:
    """Where in the slab the tensors of batches of one shape lie: the same tensors, whatever their rows ask for."""

    def __init__(self, layout: _Layout, count: int, slab: Slab) -> None:
        shape = self._shape = layout.shape
        changing = (
            torch.empty(count, 2, dtype=torch.int64, device="meta"),
            torch.empty(count, dtype=torch.int64, device="meta"),
            torch.empty(count, shape.draft_len, device="meta"),
            torch.empty(count, device="meta"),
            torch.empty(shape.draft_len, count, shape.width, shape.candidates, device="meta"),
        )
        whole = layout.tensors, changing
        memory = slab.bytes(size_of(whole))
        self._held, self._zeroed = memory[: len(layout.packed)], memory[len(layout.packed) :]
        (self._rows, self._root, self._levels), of_block = views(whole, memory)
        self._last_two, self._committed, accept, bonus, gumbel = of_block
        self._noise = Noise(gumbel.unbind(), accept, bonus)
        self._arrays = [tensor.numpy() for tensor in of_block]

    def hold(self, layout: _Layout) -> None:
        """Take over what rows ask for; noise they do not draw is 0."""
        self._held.copy_(layout.packed)
        self._zeroed.zero_()

    def batch(
        self,
        draws: Draws,
        last_two: Sequence[tuple[int, int]],
        committed: Sequence[int],
        keys: Sequence[tuple[int, int]],
    ) -> Batch:
        tail, counts, accept, bonus, gumbel = self._arrays
        tail[:] = last_two
        counts[:] = committed
        draws.into(gumbel, accept, bonus, keys)
        return Batch(
            last_two=self._last_two,
            committed=self._committed,
            longest=max(committed),
            rows=self._rows,
            root=self._root,
            places=self._levels,
            shape=self._shape,
            noise=self._noise,
        )
