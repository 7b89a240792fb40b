"""The input of a block, laid out in memory that stays the same from block to block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engines.binding import leaves
from mtad.draft import Level, root
from mtad.noise import Noise, NoiseBuffers
from mtad.params import DecodingParams
from mtad.rows import Place, Rows, Shape, block_shape, places, stack_rows
from runtime.constraints import Constraint, Constraints

KEPT, KEPT_BYTES = 64, 2**24
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
    """Makes batches. Parameters are laid out once for as long as rows ask for the same, whichever requests they are.

    Args:
        vocab_size: V.
        eos: tokens that end a text.
    """

    def __init__(self, vocab_size: int, eos: Sequence[int]) -> None:
        self._vocab_size, self._eos = vocab_size, eos
        self._layouts: OrderedDict[tuple[object, ...], _Layout] = OrderedDict()

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
            while len(self._layouts) >= KEPT or sum(kept.bytes for kept in self._layouts.values()) > KEPT_BYTES:
                self._layouts.popitem(last=False)
            layout = self._layouts[content] = _Layout(params, self._vocab_size, self._eos)
        else:
            self._layouts.move_to_end(content)
        batch = layout.batch(last_two, committed, keys)
        if any(constraint is not None for constraint in constraints):
            return replace(batch, constraints=Constraints.of(constraints))
        return batch


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
    """Parameters of a batch as tensors, and the memory of what changes from block to block."""

    def __init__(self, params: Sequence[DecodingParams], vocab_size: int, eos: Sequence[int]) -> None:
        self.shape = block_shape(params, vocab_size)
        self.rows = stack_rows(params, self.shape, vocab_size, eos)
        self.root = root(self.rows, self.shape)
        self.places = places(self.rows, self.shape)
        self.noise = NoiseBuffers(params, self.shape, vocab_size)
        self._last_two = np.zeros((len(params), 2), dtype=np.int64)
        self._committed = np.zeros(len(params), dtype=np.int64)
        self.last_two, self.committed = torch.from_numpy(self._last_two), torch.from_numpy(self._committed)
        self.bytes = sum(tensor.nbytes for tensor in leaves((self.rows, self.root, self.places, self.noise.noise)))

    def batch(
        self, last_two: Sequence[tuple[int, int]], committed: Sequence[int], keys: Sequence[tuple[int, int]]
    ) -> Batch:
        self._last_two[:] = last_two
        self._committed[:] = committed
        noise = self.noise.draw(keys)
        return Batch(
            self.last_two, self.committed, max(committed), self.rows, self.root, self.places, self.shape, noise
        )
