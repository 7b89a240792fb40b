"""The noise of one block, in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mtad.noise import Draws, LevelNoise, Noise, gumbel_noise, node_noise
from mtad.params import DecodingParams
from mtad.rows import Shape


def draw_noise(
    params: Sequence[DecodingParams],
    keys: Sequence[tuple[int, int]],
    shape: Shape,
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Noise:
    """Of a shape at least as large as each request's own; see `mtad.noise.Draws`."""
    uniform = np.zeros((shape.draft_len, len(params)), dtype=np.float32)
    gumbel = np.zeros((shape.draft_len, len(params), shape.width, gumbel_noise(shape)), dtype=np.float32)
    accept = np.zeros((len(params), shape.draft_len), dtype=np.float32)
    bonus = np.zeros(len(params), dtype=np.float32)
    nodes = np.zeros((len(params), *node_noise(shape)), dtype=np.float32)
    Draws(params, vocab_size).into(uniform, gumbel, accept, bonus, nodes, keys)
    levels = (
        LevelNoise(*(torch.from_numpy(x).to(device) for x in level)) for level in zip(uniform, gumbel, strict=True)
    )
    others = (torch.from_numpy(x).to(device) for x in (accept, bonus, nodes.reshape(len(params), -1)))
    return Noise(tuple(levels), *others)
