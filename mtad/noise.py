"""Random numbers of a block: a counter-based generator per request, keyed by (seed, block index)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtad.params import DecodingParams
from mtad.rows import Shape, top_k_of


class Noise(NamedTuple):
    """The noise of one block.

    Attributes:
        gumbel: float32 [R, draft_len, width, K], standard Gumbel; 0 where nothing is drawn.
        accept: float32 [R, draft_len], uniform [0, 1).
        bonus: float32 [R], uniform [0, 1).
    """

    gumbel: Tensor
    accept: Tensor
    bonus: Tensor


def draw_noise(
    params: Sequence[DecodingParams],
    keys: Sequence[tuple[int, int]],
    shape: Shape,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Noise:
    """Noise for a batch.

    A row draws exactly the numbers its own parameters call for and they are then placed in the batch's shape, so what
    else is in the batch does not change them. Temperature 0 is noise 0.

    Args:
        params: parameters of the R requests.
        keys: (seed, block index) of each; Philox-4x64 is keyed by the pair.
        shape: the block's shape, at least as large as each request's own.
        vocab_size: V.
    """
    rows = len(params)
    gumbel = np.zeros((rows, shape.draft_len, shape.width, shape.candidates), dtype=np.float32)
    accept = np.zeros((rows, shape.draft_len), dtype=np.float32)
    bonus = np.zeros(rows, dtype=np.float32)
    for row, (p, key) in enumerate(zip(params, keys, strict=True)):
        if p.temperature == 0:
            continue
        levels, beams, k = p.drafted, p.draft_width, top_k_of(p, vocab_size)
        generator = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))
        uniform = generator.random(1 + levels, dtype=np.float32)
        bonus[row], accept[row, :levels] = uniform[0], uniform[1:]
        if levels:
            uniform = generator.random(levels * beams * k, dtype=np.float32).reshape(levels, beams, k)
            np.clip(uniform, 2.0**-25, 1 - 2.0**-24, out=uniform)  # the logarithms stay finite
            gumbel[row, :levels, :beams, :k] = -np.log(-np.log(uniform))
    return Noise(*(torch.from_numpy(x).to(device) for x in (gumbel, accept, bonus)))
