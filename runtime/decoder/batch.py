"""The input of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mtad.draft.levels import Level
from mtad.draft.live import Live
from mtad.noise.host import Noise
from mtad.rows import Place, Rows, Shape
from runtime.constraints.adjust import Constraints


@dataclass(frozen=True)
class Batch:
    """One block's input, rows 0 .. R-1 of the caches.

    Attributes:
        last_two: int64 [R, 2], the last two committed tokens; the last is the root of the tree.
        committed: int64 [R], committed tokens.
        longest: largest of `committed`, known to the host.
        noise: of this block; of a batch for devices drawn on the device, by `padded.over`.
        cut: of a batch and a number of levels: the same block with a shorter draft, for one that has stopped early. It
            takes the place of this one.
        constraints: what rows ask of both models' logits; None where none asks for anything.
        stops: whether a draft may stop before its last level.
        by_target: bool [R], rows that the target itself drafts for; None where there is none.
        by_auxiliary: whether the auxiliary drafts for some row.
        live: beams that the draft begins with; None if no row's method keeps any.
        padded: of a batch for devices, how it is padded, and its memory; else None.
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
    padded: Padded | None = None


class Padded(NamedTuple):
    """How a batch is padded, and where it lies.

    Attributes:
        requests: rows with a request; the others pad the batch.
        real: bool [R], which those are.
        length: columns of all masks of the block.
        memory: uint8, what the batch's tensors are views of, all but the constraints'.
        over: the same batch on a device's memory that holds, or is going to hold, a copy of that: views, but for the
            noise, which it draws there.
    """

    requests: int
    real: Tensor
    length: int
    memory: Tensor
    over: Callable[[Tensor], Batch]
