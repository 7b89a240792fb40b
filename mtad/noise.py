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
        gumbel: draft_len times float32 [R, width, K], standard Gumbel; 0 where nothing is drawn.
        accept: float32 [R, draft_len], uniform [0, 1).
        bonus: float32 [R], uniform [0, 1).
        nodes: float32 [R, N], uniform [0, 1), of the scored nodes of branching drafts; [R, 0] where none branches.
    """

    gumbel: tuple[Tensor, ...]
    accept: Tensor
    bonus: Tensor
    nodes: Tensor


class NoiseBuffers:
    """Where the noise of a batch is drawn, block after block: always the same memory.

    A row draws exactly the numbers its own parameters call for and they are then placed in the batch's shape, so what
    else is in the batch does not change them. Temperature 0 is noise 0.

    Args:
        params: parameters of the R requests.
        shape: the block's shape, at least as large as each request's own.
        vocab_size: V.
    """

    def __init__(self, params: Sequence[DecodingParams], shape: Shape, vocab_size: int) -> None:
        rows = len(params)
        self._accept = np.zeros((rows, shape.draft_len), dtype=np.float32)
        self._bonus = np.zeros(rows, dtype=np.float32)
        self._gumbel = np.zeros((shape.draft_len, rows, shape.width, shape.candidates), dtype=np.float32)
        nodes = (shape.draft_len, shape.score_width) if shape.children else (0, 0)
        self._nodes = np.zeros((rows, *nodes), dtype=np.float32)
        self._rows = []
        for row, p in enumerate(params):
            levels, beams, k = p.drafted, p.draft_width, top_k_of(p, vocab_size)
            each = beams if p.spec.form == "branches" else 0
            length = max(1, min(32, 2**14 // max(1, levels * beams * k)))
            draw = _window if length > 1 else _window.__wrapped__  # a window of one block is never asked for again
            if p.temperature != 0:
                places = self._accept[row, :levels], self._gumbel[:levels, row, :beams, :k]
                self._rows.append((row, draw, (length, levels, beams, k, each), *places, self._nodes[row, :levels, :each]))
        gumbel = tuple(torch.from_numpy(level) for level in self._gumbel)
        accept, bonus, uniform = map(torch.from_numpy, (self._accept, self._bonus, self._nodes.reshape(rows, -1)))
        self.noise = Noise(gumbel, accept, bonus, uniform)

    def draw(self, keys: Sequence[tuple[int, int]]) -> Noise:
        """The noise of one block, `self.noise`, valid until the next; `keys` are (seed, block index) of each row."""
        for row, draw, (length, *sizes), accept, gumbel, nodes in self._rows:
            seed, block = keys[row]
            window, at = divmod(block, length)
            uniforms, gumbels = draw(seed, window, length, *sizes)
            self._bonus[row] = uniforms[at, 0]
            accept[:] = uniforms[at, 1 : 1 + len(accept)]
            gumbel[:] = gumbels[at]
            if nodes.size:
                nodes[:] = uniforms[at, 1 + len(accept) :].reshape(nodes.shape)
        return self.noise


def draw_noise(
    params: Sequence[DecodingParams],
    keys: Sequence[tuple[int, int]],
    shape: Shape,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Noise:
    """Noise of one block in memory of its own; see `NoiseBuffers`."""
    gumbel, accept, bonus, nodes = NoiseBuffers(params, shape, vocab_size).draw(keys)
    return Noise(tuple(level.to(device) for level in gumbel), accept.to(device), bonus.to(device), nodes.to(device))


@lru_cache(maxsize=512)
def _window(seed: int, window: int, length: int, levels: int, beams: int, k: int, each: int) -> tuple[Floats, Floats]:
    """Noise of `length` consecutive blocks of one request, drawn at once: [length, 1 + levels ..], [length, levels, ..].

    Philox-4x64 keyed by (seed; window, levels, beams): a request that changes its draft from block to block never
    meets the same numbers twice. Drawing several blocks at a time costs less than making a generator a block.
    """
    key = np.array([seed, window << 16 | levels << 8 | beams], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    uniform = generator.random((length, 1 + levels + levels * each), dtype=np.float32)
    gumbel = generator.random((length, levels, beams, k), dtype=np.float32)
    np.clip(gumbel, 2.0**-25, 1 - 2.0**-24, out=gumbel)  # the logarithms stay finite
    return uniform, -np.log(-np.log(gumbel))
