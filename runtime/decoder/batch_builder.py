"""How a block's input is laid out, in memory that stays the same from block to block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engines.buffers import Recent, Slab, packed, size_of, views
from mtad.draft.levels import Level, root
from mtad.draft.live import Beams, Live
from mtad.noise import device as device_noise
from mtad.noise.host import Draws, LevelNoise, Noise, gumbel_noise, node_noise, table_noise
from mtad.params import DecodingParams
from mtad.rows import LISTED, Place, Rows, Shape
from mtad.stacking import block_shape, places, stack_rows
from runtime.constraints.adjust import Constraints
from runtime.constraints.constraint import Constraint
from runtime.decoder.batch import Batch, Padded
from runtime.decoder.buckets import Buckets

_content = attrgetter(
    *("method", "draft_len", "beam_width", "branching", "replacement", "accept_threshold", "draft_confidence"),
    *("relaxed_topk", "fly_window_size", "temperature", "top_k", "top_p", "min_p", "ignore_eos"),
)
"""What of a row's parameters the tensors of a batch depend on."""

KEPT, KEPT_BYTES = 64, 2**22
"""Batches of parameters whose tensors are kept, and the memory they may take together; the latest is always kept."""


class BatchBuilder:
    """Makes batches, all in the same memory. Owns it: what others keep of a batch keeps nothing else alive.

    Parameters are made tensors once for as long as rows ask for the same, whichever requests they are.

    Args:
        buckets: what batches are padded to; None leaves them as they are.
        listed: candidates up to which a row's distributions are lists; others are tables.
        draw: draws a device's noise.
    """

    def __init__(
        self,
        vocab_size: int,
        eos: Sequence[int],
        buckets: Buckets | None = None,
        listed: int = LISTED,
        draw: Callable[[Tensor, Tensor, Shape], Noise] = device_noise.draw,
    ) -> None:
        self._draw = draw
        self._sizes, self._buckets = (vocab_size, eos, buckets, listed), buckets
        self._layouts: Recent[tuple[object, ...], _Layout] = Recent(KEPT)
        self._slab = Slab(pinned=buckets is not None and buckets.pinned)
        self._buffers: Recent[tuple[int, Shape], _InputBuffers] = Recent(KEPT)
        self._current: tuple[_Layout, _InputBuffers] | None = None

    def build(
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
            keys: (seed, block index) of each row.
            constraints: of each row; () where none asks for anything.
            beams: live beams of each row; () where there are none.
        """
        layout, buffers = self._buffers_for(params)
        tail, counts, *drawn = buffers.arrays
        tail[: layout.count], counts[: layout.count] = last_two, committed
        if self._buckets:
            drawn[0][: layout.count] = [device_noise.begin(*key) for key in keys]
        else:
            accept, bonus, nodes, uniform, gumbel, table = drawn
            layout.draws.into(uniform, gumbel, table, accept, bonus, nodes, keys)
        if buffers.live is not None:
            alive = [*(beams or [[]] * layout.count), *[[]] * (len(tail) - layout.count)]
            for ours, given in zip(
                buffers.live, Live.of(alive, layout.shape.draft_len, layout.shape.width), strict=True
            ):
                ours.copy_(given)
        asked = None
        if any(x is not None for x in constraints):
            asked = Constraints.of([*constraints, *[None] * (len(tail) - layout.count)])
        batch = buffers.batch(layout, max(committed), asked, partial(self._cut, params))
        return buffers.padded(batch, layout, self._buckets) if self._buckets else batch

    def _cut(self, params: Sequence[DecodingParams], batch: Batch, levels: int) -> Batch:
        """A row's noise is what it has drawn for its whole draft."""
        if levels == batch.shape.draft_len:
            return batch
        assert self._current is not None, "a batch has been laid out"
        tail, counts, accept, bonus, nodes, *_ = (values.copy() for values in self._current[1].arrays)
        layout, buffers = self._buffers_for([replace(p, draft_len=min(p.draft_len, levels)) for p in params])
        kept = tail, counts, accept[:, :levels], bonus, nodes[:, :levels, : layout.shape.score_width]
        for ours, theirs in zip(buffers.arrays, kept, strict=False):
            ours[:] = theirs
        return buffers.batch(layout, batch.longest, batch.constraints, partial(self._cut, params))

    def _buffers_for(self, params: Sequence[DecodingParams]) -> tuple[_Layout, _InputBuffers]:
        """Lay out the memory for a batch of these rows, unless it is."""
        content = tuple(map(_content, params))
        while content not in self._layouts and sum(len(kept.packed) for kept in self._layouts.values()) > KEPT_BYTES:
            self._layouts.popitem(last=False)
        layout = self._layouts.find(content, lambda: _Layout(params, *self._sizes))
        if self._current is None or self._current[0] is not layout:
            key, found = (layout.rows, layout.shape), layout
            buffers = self._buffers.find(key, lambda: _InputBuffers(found, self._slab, self._draw))
            buffers.load(layout)
            self._current = layout, buffers
        return self._current


class _Layout:
    """Parameters of a batch as tensors.

    Attributes:
        packed: `Rows`, the root's `Level`, the places, `by_target` of `Batch`, `real` of `Padded`, and `scales` of
            `mtad.noise.device.draw`, see `engines.buffers.packed`; `tensors` are views of it. Which of the last three
            there are follows from the shape, and from the kind of batches.
    """

    def __init__(
        self,
        params: Sequence[DecodingParams],
        vocab_size: int,
        eos: Sequence[int],
        buckets: Buckets | None,
        listed: int,
    ) -> None:
        self.count = self.rows = len(params)
        self.draws = Draws(params, vocab_size, listed)
        self.shape, real, scales = block_shape(params, vocab_size, listed), None, None
        if buckets:
            self.shape = buckets.shape(self.shape, vocab_size)
            self.rows = buckets.padded(self.count, self.shape)
            real = torch.arange(self.rows) < self.count
            params = [*params, *[params[-1]] * (self.rows - self.count)]
            scales = torch.tensor([device_noise.scale(p.temperature) for p in params])
        rows = stack_rows(params, self.shape, vocab_size, eos)
        by_target = [p.spec.drafter == "target" for p in params]
        drafting = torch.tensor(by_target) if any(by_target) else None
        tensors = rows, root(rows, self.shape), places(rows, self.shape), drafting, real, scales
        self.packed = packed(tensors)
        self.tensors = views(tensors, self.packed)
        self.by_auxiliary = any(p.assisted for p in params)
        # two drafters' levels are put together, so there are as many of each; live beams keep all of theirs
        one = not (any(by_target) and self.by_auxiliary) and not self.shape.live
        self.stops = one and any(p.drafted and p.confidence > 0 for p in params)


class _InputBuffers:
    """Where in the slab the tensors of batches of one shape lie: the same tensors, whatever their rows ask for.

    Attributes:
        arrays: what changes from block to block, numpy views: last two tokens, committed tokens; `states` of
            `mtad.noise.device.draw` where that is drawn on a device, else noise `accept`, `bonus`, `nodes` by levels,
            and the draft's `uniform`, `gumbel` and `table`.
        live: live beams, which change as well; None where no row has any.
    """

    def __init__(self, layout: _Layout, slab: Slab, draw: Callable[[Tensor, Tensor, Shape], Noise]) -> None:
        shape, count = layout.shape, layout.rows
        self._shape, self._draw = shape, draw

        def like(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device="meta")

        changing: tuple[Tensor, ...] = (like(count, 2, dtype=torch.int64), like(count, dtype=torch.int64))
        if layout.tensors[-1] is not None:
            changing += (like(count, dtype=torch.int64),)
        else:
            changing += (
                like(count, shape.draft_len),
                like(count),
                like(count, *node_noise(shape)),
                like(shape.draft_len, count),
                like(shape.draft_len, count, shape.width, gumbel_noise(shape)),
                like(shape.draft_len, count, shape.width, table_noise(shape)),
            )
        live = Live(
            tokens=like(count, shape.draft_len, shape.width, dtype=torch.int64),
            lengths=like(count, shape.width, dtype=torch.int64),
            weights=like(count, shape.width),
        )
        whole = layout.tensors, changing, live if shape.live else None
        self._like = views(whole, torch.empty(size_of(whole), dtype=torch.uint8, device="meta"))
        self._memory = slab.bytes(size_of(whole))
        self._held, self._zeroed = self._memory[: len(layout.packed)], self._memory[len(layout.packed) :]
        self._tensors = self._rebind(self._memory, drawn=False)
        _, of_block, self.live = views(whole, self._memory)
        self.arrays = [tensor.numpy() for tensor in of_block]

    def load(self, layout: _Layout) -> None:
        """Take over what rows ask for; noise they do not draw is 0."""
        self._held.copy_(layout.packed)
        self._zeroed.zero_()
        self.arrays[1][layout.count :] = 2

    def batch(
        self, layout: _Layout, longest: int, constraints: Constraints | None, cut: Callable[[Batch, int], Batch]
    ) -> Batch:
        return Batch(
            **self._tensors.of_batch,
            longest=longest,
            shape=self._shape,
            cut=cut,
            constraints=constraints,
            stops=layout.stops,
            by_auxiliary=layout.by_auxiliary,
        )

    def padded(self, batch: Batch, layout: _Layout, buckets: Buckets) -> Batch:
        length, count = buckets.length(batch.longest, self._shape), layout.count

        def on(memory: Tensor, drawn: bool) -> Batch:
            parts = self._rebind(memory, drawn) if drawn else self._tensors
            assert parts.real is not None
            padded = Padded(count, parts.real, length, memory, partial(on, drawn=True))
            return replace(batch, **parts.of_batch, padded=padded)

        return on(self._memory, drawn=False)

    def _rebind(self, memory: Tensor, drawn: bool) -> _Tensors:
        """Views of memory; what a device draws is `drawn` now, or not there."""
        (rows, root, places, by_target, real, scales), (last_two, committed, *numbers), live = views(self._like, memory)
        if drawn:
            noise = self._draw(numbers[0], scales, self._shape)
        elif real is not None:
            noise = Noise((), *[scales.new_empty(0)] * 3)
        else:
            accept, bonus, nodes, *of_levels = numbers
            levels = tuple(map(LevelNoise, *(x.unbind() for x in of_levels)))
            noise = Noise(levels, accept, bonus, nodes.flatten(1))
        return _Tensors(last_two, committed, rows, root, places, noise, by_target, live, real)


class _Tensors(NamedTuple):
    """The tensors of a `Batch`, and of its `Padded`."""

    last_two: Tensor
    committed: Tensor
    rows: Rows
    root: Level
    places: tuple[Place, ...]
    noise: Noise
    by_target: Tensor | None
    live: Live | None
    real: Tensor | None

    @property
    def of_batch(self) -> dict[str, Any]:
        """Those of the batch itself, by the names of its fields."""
        return {name: value for name, value in self._asdict().items() if name != "real"}
