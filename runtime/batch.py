"""The input of a block, laid out in memory that stays the same from block to block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mtad.draft import Level, root
from mtad.live import Beams, Live
from mtad.noise import Draws, Noise, node_noise
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
        cut: of a batch and a number of levels: the same block with a shorter draft, for one that has stopped early. It
            takes the place of this one.
        constraints: what rows ask of both models' logits; None where none asks for anything.
        stops: whether a draft may stop before its last level.
        by_target: bool [R], rows that the target itself drafts for; None where there is none.
        by_auxiliary: whether the auxiliary drafts for some row.
        live: beams that the draft begins with; None if no row's method keeps any.
    """

    last_two: Tensor
    committed: Tensor
    longest: int
    rows: Rows
    root: Level
    places: tuple[Place, ...]
    shape: Shape
    noise: Noise
    cut: Callable[[Batch, int], Batch]
    constraints: Constraints | None = None
    stops: bool = False
    by_target: Tensor | None = None
    by_auxiliary: bool = True
    live: Live | None = None


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
        beams: Sequence[Beams] = (),
    ) -> Batch:
        """The input of a block; its tensors are valid until the next call.

        Args:
            params: of each row, as far as this block goes: a draft may be shorter or narrower than the request's.
            last_two: the last two committed tokens of each row.
            committed: committed tokens of each row.
            keys: (seed, block index) of each row.
            constraints: of each row; () where none asks for anything.
            beams: live beams of each row; () where there are none.
        """
        layout, place = self._place(params)
        tail, counts, accept, bonus, nodes, gumbel = place.arrays
        tail[:], counts[:] = last_two, committed
        layout.draws.into(gumbel, accept, bonus, nodes, keys)
        asked = Constraints.of(constraints) if any(x is not None for x in constraints) else None
        batch = place.batch(layout, max(committed), asked, partial(self._cut, params))
        if not layout.shape.live:
            return batch
        return replace(batch, live=Live.of(beams or [[]] * len(params), layout.shape.draft_len, layout.shape.width))

    def _cut(self, params: Sequence[DecodingParams], batch: Batch, levels: int) -> Batch:
        """See `Batch.cut`. A row's noise is what it has drawn for its whole draft."""
        if levels == batch.shape.draft_len:
            return batch
        assert self._placed is not None, "a batch has been laid out"
        tail, counts, accept, bonus, nodes, _ = (values.copy() for values in self._placed[1].arrays)
        layout, place = self._place([replace(p, draft_len=min(p.draft_len, levels)) for p in params])
        kept = tail, counts, accept[:, :levels], bonus, nodes[:, :levels, : layout.shape.score_width]
        for ours, theirs in zip(place.arrays, kept, strict=False):
            ours[:] = theirs
        return place.batch(layout, batch.longest, batch.constraints, partial(self._cut, params))

    def _place(self, params: Sequence[DecodingParams]) -> tuple[_Layout, _Place]:
        """Lay out the memory for a batch of these rows, unless it is."""
        content = tuple(map(_content, params))
        layout = self._layouts.get(content)
        if layout is None:
            while len(self._layouts) >= KEPT or sum(len(kept.packed) for kept in self._layouts.values()) > KEPT_BYTES:
                self._layouts.popitem(last=False)
            layout = self._layouts[content] = _Layout(params, self._vocab_size, self._eos)
        else:
            self._layouts.move_to_end(content)
        if self._placed is None or self._placed[0] is not layout:
            key = len(params), layout.shape
            place = self._places.get(key)
            if place is None:
                if len(self._places) >= KEPT:
                    self._places.popitem(last=False)
                place = self._places[key] = _Place(layout, len(params), self._slab)
            else:
                self._places.move_to_end(key)
            place.hold(layout)
            self._placed = layout, place
        return self._placed


def _content(p: DecodingParams) -> tuple[object, ...]:
    """What of a row's parameters the tensors of a batch depend on."""
    return (
        p.method,
        p.draft_len,
        p.beam_width,
        p.branching,
        p.replacement,
        p.accept_threshold,
        p.draft_confidence,
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
        stops, by_target, by_auxiliary: of `Batch`.
    """

    def __init__(self, params: Sequence[DecodingParams], vocab_size: int, eos: Sequence[int]) -> None:
        self.shape = block_shape(params, vocab_size)
        rows = stack_rows(params, self.shape, vocab_size, eos)
        tensors = rows, root(rows, self.shape), places(rows, self.shape)
        self.packed = packed(tensors)
        self.tensors = views(tensors, self.packed)
        self.draws = Draws(params, vocab_size)
        by_target = [p.spec.drafter == "target" for p in params]
        self.by_target = torch.tensor(by_target) if any(by_target) else None
        self.by_auxiliary = any(p.assisted for p in params)
        # two drafters' levels are put together, so there are as many of each; live beams keep all of theirs
        one = not (any(by_target) and self.by_auxiliary) and not self.shape.live
        self.stops = one and any(p.drafted and p.confidence > 0 for p in params)


class _Place:
    """Where in the slab the tensors of batches of one shape lie: the same tensors, whatever their rows ask for.

    Attributes:
        arrays: what changes from block to block, numpy views: last two tokens, committed tokens; noise `accept`,
            `bonus`, `nodes` by levels, `gumbel`.
    """

    def __init__(self, layout: _Layout, count: int, slab: Slab) -> None:
        shape = self._shape = layout.shape
        changing = (
            torch.empty(count, 2, dtype=torch.int64, device="meta"),
            torch.empty(count, dtype=torch.int64, device="meta"),
            torch.empty(count, shape.draft_len, device="meta"),
            torch.empty(count, device="meta"),
            torch.empty(count, *node_noise(shape), device="meta"),
            torch.empty(shape.draft_len, count, shape.width, shape.candidates, device="meta"),
        )
        whole = layout.tensors, changing
        memory = slab.bytes(size_of(whole))
        self._held, self._zeroed = memory[: len(layout.packed)], memory[len(layout.packed) :]
        (self._rows, self._root, self._levels), of_block = views(whole, memory)
        self._last_two, self._committed, accept, bonus, nodes, gumbel = of_block
        self._noise = Noise(gumbel.unbind(), accept, bonus, nodes.flatten(1))
        self.arrays = [tensor.numpy() for tensor in of_block]

    def hold(self, layout: _Layout) -> None:
        """Take over what rows ask for; noise they do not draw is 0."""
        self._held.copy_(layout.packed)
        self._zeroed.zero_()

    def batch(
        self, layout: _Layout, longest: int, constraints: Constraints | None, cut: Callable[[Batch, int], Batch]
    ) -> Batch:
        return Batch(
            last_two=self._last_two,
            committed=self._committed,
            longest=longest,
            rows=self._rows,
            root=self._root,
            places=self._levels,
            shape=self._shape,
            noise=self._noise,
            cut=cut,
            constraints=constraints,
            stops=layout.stops,
            by_target=layout.by_target,
            by_auxiliary=layout.by_auxiliary,
        )
