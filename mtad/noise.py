"""Random numbers of a block: a counter-based generator per request, keyed by its seed, at the block's position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtad.params import DecodingParams
from mtad.rows import Shape, top_k_of

Floats = npt.NDArray[np.float32]


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
        keys: (seed, block index) of each.
        shape: the block's shape, at least as large as each request's own.
        vocab_size: V.
        device: of the result.
    """
    rows = len(params)
    count = shape.draft_len + 1
    noise = np.zeros((rows, count + shape.draft_len * shape.width * shape.candidates), dtype=np.float32)
    uniform = noise[:, :count]
    gumbel = noise[:, count:].reshape(rows, shape.draft_len, shape.width, shape.candidates)
    for row, (p, (seed, block)) in enumerate(zip(params, keys, strict=True)):
        if p.temperature == 0:
            continue
        levels, beams, k = p.drafted, p.draft_width, top_k_of(p, vocab_size)
        length = max(1, min(32, 2**14 // max(1, levels * beams * k)))
        draw = _window if length > 1 else _window.__wrapped__  # a window of one block is never asked for again
        uniforms, gumbels = draw(seed, block // length, length, levels, beams, k)
        uniform[row, : levels + 1] = uniforms[block % length]
        gumbel[row, :levels, :beams, :k] = gumbels[block % length]
    both = torch.from_numpy(noise).to(device)
    shaped = both[:, count:].view(rows, shape.draft_len, shape.width, shape.candidates)
    return Noise(shaped, both[:, 1:count], both[:, 0])


@lru_cache(maxsize=512)
def _window(seed: int, window: int, length: int, levels: int, beams: int, k: int) -> tuple[Floats, Floats]:
    """Noise of `length` consecutive blocks of one request, drawn at once: [length, 1 + levels], [length, levels, ..].

    Philox-4x64 keyed by (seed, window). Drawing several blocks at a time costs less than making a generator a block.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, window], dtype=np.uint64)))
    uniform = generator.random((length, 1 + levels), dtype=np.float32)
    gumbel = generator.random((length, levels, beams, k), dtype=np.float32)
    np.clip(gumbel, 2.0**-25, 1 - 2.0**-24, out=gumbel)  # the logarithms stay finite
    return uniform, -np.log(-np.log(gumbel))
